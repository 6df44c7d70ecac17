// The machine at work: gauges, the cache, the running batch and the queue.

import { CacheMap } from "./cache_map.js";
import { Colours } from "./colours.js";
import { byId, h } from "./dom.js";
import { Feed } from "./feed.js";
import { labelOf } from "./labels.js";

const LISTED = 24;

const LEGEND = [
  ["held", "in use"], ["shared", "shared"], ["found", "reused"], ["cached", "cached for reuse"], ["free", "free"],
];

// What the numbers of the feed are called, and what they mean, in a line each.
const GAUGES = [
  ["in use", ({ pages }) => pages.held, "pages of running requests"],
  ["kept", ({ pages }) => pages.cached, "pages of finished requests; prompts with the same beginning reuse them"],
  ["free", ({ pages }) => pages.free, "empty pages for new tokens"],
  ["a page", ({ pages }) => pages.tokens, "tokens whose keys and values fit into one page"],
  ["steps", ({ steps }) => steps, "times that the model ran; each gives every answer its next token"],
];

export class Machine {
  constructor() {
    this.own = new Set();
    this.colours = new Colours();
    this.map = new CacheMap(this.colours);
    this.lists = { running: h("ul", { class: "list" }), waiting: h("ul", { class: "list" }) };
    this.titles = { running: h("h3", {}, "Running"), waiting: h("h3", {}, "Queue") };
    byId("map").append(this.map.element, makeLegend());
    for (const name of ["running", "waiting"]) byId("requests").append(h("section", {}, this.titles[name], this.lists[name]));
    this.feed = new Feed((frame) => this.show(frame), (message) => this.say(message));
  }

  watch() {
    if (document.body.dataset.feed === "off") this.say("The live feed is switched off on this server (--no-enable-cache-map).");
    else this.feed.open();
  }

  // This page's own request, by the id in its answer: the engine numbers its prompts.
  mine(id) {
    this.own.add(labelOf(`${id}-0`));
  }

  say(message) {
    byId("machine-summary").hidden = Boolean(message);
    byId("feed-state").textContent = message;
    byId("feed-state").hidden = !message;
    byId("machine-view").hidden = Boolean(message);
  }

  show(frame) {
    if (frame.engine !== "up") return this.say("The engine is being started again …");
    if (!frame.pages.total) return this.say("This model reads its inputs whole: it has no paged cache.");
    this.say("");
    this.colours.see([...frame.running, ...frame.waiting].map((item) => item.request));
    this.summarise(frame);
    this.showGauges(frame);
    this.map.show(frame);
    this.showList("running", "Running", frame.running, frame.num_running);
    this.showList("waiting", "Queue", frame.waiting, frame.num_waiting);
    byId("machine").dataset.held = frame.pages.held;
    byId("machine").dataset.cached = frame.pages.cached;
    byId("machine").dataset.frames = Number(byId("machine").dataset.frames ?? 0) + 1;
  }

  // All that is seen while the box is folded, and a bar for the whole cache.
  summarise({ num_running: running, num_waiting: waiting, pages }) {
    const percent = (count) => `${((100 * count) / pages.total).toFixed(count && count < pages.total / 10 ? 1 : 0)}%`;
    byId("machine-summary").textContent = `${running} running, ${waiting} queued, cache ${percent(pages.held)} in use`;
    const shares = byId("shares");
    shares.setAttribute("aria-label", `Cache: ${percent(pages.held)} in use, ${percent(pages.cached)} kept, ${percent(pages.free)} free`);
    for (const name of ["held", "cached"]) shares.style.setProperty(`--${name}-share`, pages[name] / pages.total);
  }

  showGauges(frame) {
    const gauge = ([name, read, meaning]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, h("b", {}, read(frame).toLocaleString("en")), h("span", { class: "hint" }, meaning)));
    byId("gauges").replaceChildren(...GAUGES.map(gauge));
  }

  showList(name, title, items, count) {
    this.titles[name].textContent = `${title} (${count})`;
    const lines = items.slice(0, LISTED).map((item) => this.line(item, name === "waiting"));
    if (count > lines.length) lines.push(h("li", { class: "hint" }, `and ${count - lines.length} more`));
    this.lists[name].replaceChildren(...(lines.length ? lines : [h("li", { class: "hint" }, name === "running" ? "nothing" : "empty")]));
  }

  line(item, waits) {
    const swatch = h("span", { class: `swatch request-${this.colours.of(item.request)}`, "aria-hidden": "true" });
    const facts = [`${item.prompt} + ${item.answer} tokens`];
    if (item.sequences > 1) facts.push(`${item.sequences} ${item.beams ? "beams" : "answers"}`);
    if (!waits) facts.push(`${item.pages} page${item.pages === 1 ? "" : "s"}${item.found ? `, ${item.found} used again` : ""}`);
    if (waits && item.answer) facts.push("gave way");
    const own = this.own.has(item.request) ? h("span", { class: "own" }, "yours") : null;
    const line = h("li", {}, swatch, h("code", {}, item.request), own, h("span", { class: "facts" }, facts.join(" · ")));
    if (!waits && item.computed < item.prompt) line.append(readingBar(item.computed / item.prompt));
    return line;
  }
}

// How much of its prompt a request has read.
function readingBar(share) {
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", share);
  return bar;
}

function makeLegend() {
  const items = LEGEND.map(([name, words]) => h("li", {}, h("span", { class: `key key-${name}`, "aria-hidden": "true" }), words));
  return h("ul", { class: "legend", "aria-label": "Legend" }, items);
}
