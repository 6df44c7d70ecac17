// The paged cache: a cell for each page, or for each few of them where there are very many.

import { Colours } from "./colours.js";
import { h, newId, oncePerFrame } from "./dom.js";
import { Glow } from "./glow.js";

const LARGEST = 18; // pixels of a cell's side
const HEIGHT = 400;
const GLOW_STEP = 120; // milliseconds

export class CacheMap {
  constructor(colours) {
    this.colours = colours;
    this.cursor = null;
    this.cells = [];
    this.glow = new Glow();
    const id = newId("map");
    this.canvas = h("canvas", {
      tabindex: "0", role: "img", "aria-describedby": id, "aria-label": "Pages of the cache",
      "aria-keyshortcuts": "ArrowLeft ArrowRight ArrowUp ArrowDown",
    });
    this.note = h("p", { class: "hint note", id, "aria-live": "polite" }, "Touch a page, or use the arrow keys.");
    this.element = h("div", {}, this.canvas, this.note);
    this.drawSoon = oncePerFrame(() => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.pointAt(event));
    this.canvas.addEventListener("pointerdown", (event) => this.pointAt(event));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(this.drawSoon).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.drawSoon);
  }

  show(frame) {
    this.frame = frame;
    this.cells = [];
    const kinds = readKinds(frame.kinds);
    for (let at = 0; at < frame.cells.length; at += 2) {
      for (let count = frame.cells[at]; count > 0; count--) this.cells.push(kinds[frame.cells[at + 1]]);
    }
    this.glow.see(this.cells);
    const { total, free, held, cached } = frame.pages;
    this.canvas.setAttribute("aria-label", `${total} pages: ${held} in use, ${cached} kept, ${free} free`);
    if (this.cursor !== null) this.tell();
    this.drawSoon();
  }

  layout() {
    const width = this.element.clientWidth;
    const fits = Math.floor(Math.sqrt((width * HEIGHT) / Math.max(this.cells.length, 1)));
    this.size = Math.max(2, Math.min(LARGEST, fits));
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.rows = Math.ceil(this.cells.length / this.columns);
    const ratio = window.devicePixelRatio || 1;
    const height = this.rows * this.size;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      this.canvas.style.setProperty("height", `${height}px`);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    return pen;
  }

  draw() {
    if (!this.frame || !this.element.clientWidth) return;
    const pen = this.layout();
    const style = getComputedStyle(document.documentElement);
    const ink = (name) => style.getPropertyValue(`--${name}`);
    const inks = { free: ink("rule"), cached: ink("cached"), mark: ink("paper"), cursor: ink("ink") };
    const palette = Colours.read();
    const side = this.size - (this.size > 5 ? 2 : this.size > 3 ? 1 : 0);
    this.cells.forEach((kind, place) => {
      const x = (place % this.columns) * this.size;
      const y = Math.floor(place / this.columns) * this.size;
      this.drawCell(pen, kind, x, y, side, inks, palette);
      const glow = this.glow.of(place);
      if (!glow) return;
      pen.globalAlpha = 0.45 * glow.strength;
      pen.fillStyle = palette[this.colours.of(glow.request)];
      pen.fillRect(x, y, side, side);
      pen.globalAlpha = 1;
    });
    if (!this.glow.isOver) setTimeout(this.drawSoon, GLOW_STEP);
    if (this.cursor === null) return;
    pen.strokeStyle = inks.cursor;
    pen.lineWidth = 2;
    pen.strokeRect((this.cursor % this.columns) * this.size - 0.5, Math.floor(this.cursor / this.columns) * this.size - 0.5, side + 1, side + 1);
  }

  // Not by colour alone: free is hollow, cached is hatched, shared is split in two, and what was found has a dot.
  drawCell(pen, kind, x, y, side, inks, palette) {
    if (!kind.held && !kind.cached) {
      pen.strokeStyle = inks.free;
      pen.lineWidth = 1;
      if (side > 7) return pen.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
      pen.fillStyle = inks.free;
      const dot = side > 3 ? 2 : 1;
      pen.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
      return;
    }
    if (!kind.held) {
      pen.fillStyle = inks.cached;
      const thick = side > 4 ? 1.5 : Math.min(side, 2);
      for (let line = 0; line < side; line += 3) pen.fillRect(x, y + line, side, Math.min(thick, side - line));
      return;
    }
    const [first, second] = kind.requests;
    pen.fillStyle = palette[this.colours.of(first)];
    pen.fillRect(x, y, side, side);
    if (kind.tables > 1 && side > 3) {
      pen.fillStyle = second === undefined ? inks.mark : palette[this.colours.of(second)];
      pen.globalAlpha = second === undefined ? 0.45 : 1;
      pen.beginPath();
      pen.moveTo(x + side, y);
      pen.lineTo(x + side, y + side);
      pen.lineTo(x, y + side);
      pen.fill();
      pen.globalAlpha = 1;
    }
    if (kind.found && side > 5) {
      pen.fillStyle = inks.mark;
      pen.beginPath();
      pen.arc(x + side / 2, y + side / 2, side / 5, 0, 7);
      pen.fill();
    }
  }

  pointAt(event) {
    const place = Math.floor(event.offsetY / this.size) * this.columns + Math.floor(event.offsetX / this.size);
    if (place >= 0 && place < this.cells.length) this.choose(place);
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
    if (!step || !this.cells.length) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.cells.length - 1, (this.cursor ?? -step) + step)));
  }

  choose(place) {
    this.cursor = place;
    this.tell();
    this.drawSoon();
  }

  tell() {
    const words = describeCell(this.cells[this.cursor], this.cursor, this.frame.pages);
    if (this.note.textContent !== words) this.note.textContent = words;
  }
}

// The feed has a list for each property; here a kind is an object.
const readKinds = (kinds) =>
  kinds.held.map((_, place) => Object.fromEntries(Object.entries(kinds).map(([name, values]) => [name, values[place]])));

export function describeCell(kind, place, { per_cell: size, total }) {
  const first = place * size + 1;
  const last = Math.min(first + size - 1, total);
  const name = size === 1 ? `Page ${first}` : `Pages ${first} to ${last}`;
  const others = kind.others ? ` and ${kind.others} more` : "";
  const parts = [];
  const free = last - first + 1 - kind.held - kind.cached;
  if (kind.held) parts.push(`${size === 1 ? "in use" : `${kind.held} in use`} by ${kind.requests.join(", ")}${others}`);
  if (kind.tables > 1) parts.push(`shared by ${size === 1 ? "" : "up to "}${kind.tables} sequences`);
  if (kind.found) parts.push(size === 1 ? "used again" : `${kind.found} used again`);
  if (kind.cached) parts.push(size === 1 ? "kept: a later prompt may use it again" : `${kind.cached} kept`);
  if (free) parts.push(size === 1 ? "free" : `${free} free`);
  return `${name}: ${parts.join("; ")}.`;
}
