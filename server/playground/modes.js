// The tabs: which pane is shown. Left and right go from one to the next.

import { byId, h } from "./dom.js";

export class Modes {
  constructor(onChange) {
    this.onChange = onChange;
    this.list = byId("modes");
    this.list.addEventListener("keydown", (event) => this.move(event));
  }

  show(panes) {
    this.panes = panes;
    this.tabs = panes.map((pane) =>
      h(
        "button",
        {
          type: "button", role: "tab", id: `tab-${pane.name}`, "aria-controls": `pane-${pane.name}`,
          onclick: () => this.choose(pane),
        },
        pane.title,
      ),
    );
    for (const pane of panes) {
      Object.assign(pane.element, { id: `pane-${pane.name}`, role: "tabpanel" });
      pane.element.setAttribute("aria-labelledby", `tab-${pane.name}`);
    }
    this.list.replaceChildren(...this.tabs);
    byId("panes").replaceChildren(...panes.map((pane) => pane.element));
    if (panes.length) this.choose(panes[0]);
  }

  choose(pane) {
    this.current = pane;
    this.panes.forEach((other, place) => {
      const chosen = other === pane;
      other.element.hidden = !chosen;
      this.tabs[place].setAttribute("aria-selected", String(chosen));
      this.tabs[place].tabIndex = chosen ? 0 : -1;
    });
    this.onChange(pane);
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (this.panes.indexOf(this.current) + step + this.panes.length) % this.panes.length;
    this.choose(this.panes[next]);
    this.tabs[next].focus();
  }
}
