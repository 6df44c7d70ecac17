// The list of conversations: open, search, rename, export, import, delete. On a small screen it is a drawer.

import { byId, h } from "./dom.js";
import { download, fileName, readFile, toJson, toMarkdown } from "./transfer.js";

const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

export class History {
  // `actions` has open(conversation), begin() and removed(id).
  constructor(store, actions) {
    Object.assign(this, { store, actions, current: null });
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.draw() });
    this.list = h("ul", { class: "threads" });
    this.notice = h("p", { class: "hint", role: "status" });
    this.file = h("input", { type: "file", id: "import-file", class: "unseen", accept: ".json,.md", multiple: true, onchange: () => this.read() });
    this.all = button("Export all", () => download("conversations.json", toJson(this.store.list()), "application/json"));
    byId("history").replaceChildren(
      h("div", { class: "row" }, h("button", { type: "button", id: "new", onclick: () => this.leave(actions.begin) }, "New conversation")),
      this.search, this.list, this.notice,
      h("div", { class: "row" }, this.file, h("label", { for: "import-file", class: "quiet as-button" }, "Import"), this.all),
    );
    this.toggle = byId("history-button");
    this.toggle.addEventListener("click", () => this.show(this.toggle.getAttribute("aria-expanded") !== "true"));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.show(false));
    document.addEventListener("pointerdown", (event) => event.target.closest("#history, #history-button") || this.show(false));
    store.onChange = () => this.draw();
    if (!store.lasting) this.notice.textContent = "This browser keeps no conversations here: they end with the page.";
    this.draw();
  }

  // Only a small screen folds the list away.
  show(shown) {
    if ((this.toggle.getAttribute("aria-expanded") === "true") === shown) return;
    this.toggle.setAttribute("aria-expanded", String(shown));
    if (shown) this.search.focus();
    else if (byId("history").contains(document.activeElement)) this.toggle.focus();
  }

  leave(action) {
    this.show(false);
    action();
  }

  mark(id) {
    this.current = id;
    this.draw();
  }

  draw() {
    const found = this.store.list(this.search.value);
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    if (this.list.querySelector("input")) return; // a title is being typed
    this.list.replaceChildren(...found.map((item) => this.line(item)));
    if (!found.length) this.list.append(h("li", { class: "hint" }, this.search.value ? "Nothing found." : "No conversations yet."));
    this.all.hidden = !this.store.all.size;
    if (focused) this.list.querySelector(`[data-key="${focused}"]`)?.focus();
  }

  line(item) {
    const chosen = item.id === this.current;
    const onclick = () => this.leave(() => this.actions.open(item));
    const open = h(
      "button",
      { type: "button", class: "thread-title", "data-key": item.id, "aria-current": chosen ? "true" : null, onclick },
      item.title || "Untitled", h("span", { class: "hint" }, date.format(item.updated)),
    );
    if (!chosen) return h("li", {}, open);
    const save = (ending, text, type) => download(fileName(item.title, ending), text, type);
    const acts = h(
      "div", { class: "acts" },
      button("Rename", () => this.rename(item, open)),
      button("Markdown", () => save("md", toMarkdown(item), "text/markdown")),
      button("JSON", () => save("json", toJson([item]), "application/json")),
      button("Delete", () => this.remove(item)),
    );
    return h("li", { class: "chosen-thread" }, open, acts);
  }

  rename(item, place) {
    const input = h("input", { "aria-label": "Title", value: item.title });
    let over = false;
    const close = (keep) => {
      if (over) return;
      over = true;
      input.remove();
      if (keep && input.value.trim()) this.actions.rename(item, input.value.trim());
      else this.draw();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") close(event.key === "Enter");
      if (event.key === "Escape") event.stopPropagation();
    });
    input.addEventListener("blur", () => close(true));
    place.replaceWith(input);
    input.select();
  }

  async remove(item) {
    await this.store.remove(item.id);
    this.actions.removed(item.id);
    const undo = button("Undo", async () => {
      await this.store.save(item);
      this.notice.replaceChildren();
      this.actions.open(item);
    });
    this.notice.replaceChildren(`“${item.title}” is deleted. `, undo);
    undo.focus();
  }

  async read() {
    try {
      let last = null;
      for (const file of this.file.files) {
        for (const one of readFile(file.name, await file.text())) await this.store.save((last = one));
      }
      this.notice.replaceChildren();
      if (last) this.leave(() => this.actions.open(last));
    } catch (error) {
      this.notice.textContent = error.message;
    }
    this.file.value = "";
  }
}

const button = (label, onclick) => h("button", { type: "button", class: "quiet", onclick }, label);
