// A scroll area that follows what is added at its end, until the reader scrolls up. A button leads back to the end.

import { h } from "./dom.js";

const NEAR = 32; // pixels from the end that still count as the end

export class Follower {
  // `area` scrolls, and `content` in it grows.
  constructor(area, content) {
    Object.assign(this, { area, following: true, top: 0 });
    this.button = h("button", { type: "button", class: "latest", hidden: true, onclick: () => this.follow() }, "↓ Latest");
    area.addEventListener("scroll", () => this.scrolled());
    const observer = new ResizeObserver(() => this.following && this.follow());
    observer.observe(content);
    observer.observe(area);
  }

  get atEnd() {
    return this.area.scrollHeight - this.area.clientHeight - this.area.scrollTop <= NEAR;
  }

  // Only a move up is the reader's: the text may have grown since a move down.
  scrolled() {
    if (this.area.scrollTop < this.top && !this.atEnd) this.following = false;
    else if (this.atEnd) this.following = true;
    this.top = this.area.scrollTop;
    this.button.hidden = this.following;
  }

  follow() {
    this.following = true;
    this.button.hidden = true;
    this.area.scrollTop = this.area.scrollHeight;
    this.top = this.area.scrollTop;
  }
}
