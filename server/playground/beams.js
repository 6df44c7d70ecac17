// A beam search as a tree: what all beams agree on is its trunk, beams that were given up are pruned, and in the end one
// answer is left standing out.

import { h, oncePerFrame } from "./dom.js";
import { markOf } from "./words.js";

class Node {
  constructor(parent, text, score, state) {
    const mark = markOf(text); // an end needs no word: its score says so
    Object.assign(this, { parent, text: mark === null ? text : state === "ended" ? "" : "·", score, state, children: [] });
    parent?.children.push(this);
  }

  // Without what no beam goes on from; whether anything is left.
  prune() {
    this.children = this.children.filter((child) => child.prune());
    return this.children.length > 0 || this.state !== "past";
  }
}

export class BeamTree {
  constructor(section, place) {
    Object.assign(this, { section, place });
    this.drawSoon = oncePerFrame(() => this.draw());
    this.start();
  }

  start() {
    this.root = new Node(null, "", 0, "past");
    this.live = [this.root];
    this.ended = [];
    this.width = 0;
    this.section.hidden = true;
    this.place.replaceChildren();
  }

  // Each step says which beam of the step before goes on, or ends, with which token.
  feed({ steps }) {
    for (const { live, ended } of steps) {
      const parents = this.live;
      for (const node of parents) node.state = "past";
      this.width = Math.max(this.width, live.length);
      this.live = live.map((move) => new Node(parents[move.parent], move.token, move.score, "live"));
      this.ended.push(...ended.map((move) => new Node(parents[move.parent], move.token, move.score, "ended")));
    }
    this.keepBest();
    this.root.prune();
    this.section.hidden = false;
    this.drawSoon();
  }

  // As many finished beams as are searched for; the others have lost.
  keepBest() {
    this.ended.sort((a, b) => b.score - a.score);
    for (const node of this.ended.splice(Math.max(this.width, 1))) node.state = "past";
  }

  end() {
    if (!this.live.length && this.ended.length) this.ended[0].best = true;
    this.drawSoon();
  }

  draw() {
    const settled = this.root.children.length === 1;
    this.place.replaceChildren(h("ul", { class: "tree" }, this.root.children.map((child) => drawRun(child, settled))));
    this.place.parentElement.dataset.live = this.live.length;
    this.place.parentElement.dataset.ended = this.ended.length;
  }
}

// Nodes without a branch between them are one line of text.
function drawRun(node, settled) {
  let text = node.text;
  while (node.children.length === 1 && node.state === "past") {
    [node] = node.children;
    text += node.text;
  }
  const trunk = settled && (node.children.length > 0 || node.best);
  const line = h("span", { class: trunk ? "run trunk" : "run" }, text);
  const leaf = node.state === "past" ? null : h("span", { class: `score ${node.state}` }, leafWords(node));
  const below = node.children.map((child) => drawRun(child, false));
  return h("li", { class: node.best ? "best" : null }, h("div", {}, line, " ", leaf), below.length ? h("ul", {}, below) : null);
}

function leafWords(node) {
  const score = node.score.toFixed(2).replace("-", "−");
  if (node.best) return `chosen ${score}`;
  return node.state === "ended" ? `ended ${score}` : score;
}
