// Conversations in the browser's database. Where the browser has none for this page, they last as long as the page.

import { branch } from "./conversation.js";

const LIMIT = 16 * 2 ** 20; // characters of all conversations together
const TABLE = "conversations";

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

export class StorageFull extends Error {
  constructor(limit) {
    const size = limit >= 2 ** 20 ? `${limit / 2 ** 20} MB` : `${limit} characters`;
    super(`Not saved: conversations may take ${size} in this browser, and that is used up. Export or delete some.`);
  }
}

export class Store {
  constructor(name = "octavo", limit = LIMIT) {
    Object.assign(this, { name, limit, all: new Map(), sizes: new Map(), database: null, onChange: () => {} });
    this.channel = new BroadcastChannel(`${name}-${TABLE}`);
    this.channel.onmessage = () => this.lasting && this.load(); // another tab has changed something
  }

  async open() {
    try {
      const request = indexedDB.open(this.name, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      this.database = await settled(request);
    } catch {
      return; // a private window may refuse; `lasting` says so
    }
    await this.load();
  }

  get lasting() {
    return this.database !== null;
  }

  table(mode = "readonly") {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }

  async load() {
    const found = await settled(this.table().getAll());
    this.all = new Map(found.map((item) => [item.id, item]));
    this.sizes = new Map(found.map((item) => [item.id, JSON.stringify(item).length]));
    this.onChange();
  }

  // Newest first; all whose title or messages hold the text.
  list(search = "") {
    const wanted = search.trim().toLowerCase();
    const holds = (text) => text.toLowerCase().includes(wanted);
    const found = [...this.all.values()].filter(({ title, messages }) => holds(title) || messages.some(({ content }) => holds(content)));
    return found.sort((a, b) => b.updated - a.updated);
  }

  // Makes a branch of a conversation that another tab has saved since this one opened or saved it: both are kept.
  part(conversation) {
    if (!(this.all.get(conversation.id)?.updated > conversation.updated)) return;
    const { id, title } = branch(conversation, 0);
    Object.assign(conversation, { id, title });
  }

  // Throws StorageFull.
  async save(conversation) {
    const { id } = conversation;
    const text = JSON.stringify(conversation);
    const others = [...this.sizes].reduce((sum, [other, size]) => (other === id ? sum : sum + size), 0);
    if (others + text.length > this.limit) throw new StorageFull(this.limit);
    const kept = JSON.parse(text);
    this.all.set(id, kept);
    this.sizes.set(id, text.length);
    this.onChange();
    await this.change((table) => table.put(kept));
  }

  async remove(id) {
    this.all.delete(id);
    this.sizes.delete(id);
    this.onChange();
    await this.change((table) => table.delete(id));
  }

  async change(write) {
    if (!this.lasting) return;
    try {
      await settled(write(this.table("readwrite")));
    } catch (error) {
      throw error.name === "QuotaExceededError" ? new StorageFull(this.limit) : error;
    }
    this.channel.postMessage("changed");
  }
}
