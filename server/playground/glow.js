// What was held a moment ago glows on: a small model is done with a request before one can look.

const MILLISECONDS = 5000;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Glow {
  constructor() {
    this.held = [];
    this.left = new Map();
  }

  see(cells) {
    if (this.held.length !== cells.length) this.held = Array(cells.length).fill(null);
    const now = performance.now();
    cells.forEach((kind, place) => {
      if (kind.held) this.left.delete(place);
      else if (this.held[place] !== null && !still.matches) this.left.set(place, { request: this.held[place], since: now });
      this.held[place] = kind.held ? (kind.requests[0] ?? null) : null;
    });
  }

  get isOver() {
    return this.left.size === 0;
  }

  // The request that held the cell, and how much of its colour is left, from 1 to 0; null where there is none.
  of(place) {
    const glow = this.left.get(place);
    if (!glow) return null;
    const strength = 1 - (performance.now() - glow.since) / MILLISECONDS;
    if (strength > 0) return { request: glow.request, strength };
    this.left.delete(place);
    return null;
  }
}
