// A conversation, a field for what is said next, and the list of other conversations.

import { asSent, Composer, systemField } from "./composer.js";
import { branch, copyOf, fresh, resultsAt, titleFrom } from "./conversation.js";
import { h } from "./dom.js";
import { FieldError } from "./fields.js";
import { History } from "./history.js";
import { Meter } from "./meter.js";
import { Session } from "./session.js";
import { Thread } from "./thread.js";

const SAVE = 1000; // milliseconds between two saves of an answer that is coming

export class ChatPane {
  name = "chat";
  title = "Chat";
  path = "/v1/chat/completions";
  schema = "chat";

  constructor(context) {
    Object.assign(this, { context, session: new Session(context, "Send"), meter: new Meter(), conversation: fresh() });
    this.gone = new Set(); // ids of what was deleted
    this.thread = new Thread({
      again: (at) => this.replace(this.messages.slice(0, at)),
      edit: (at, text) => this.edit(at, text),
      split: (at) => this.split(at),
      fill: (text) => this.type(text),
      changed: context.changed,
      sendResults: () => this.replace([...this.messages, ...this.waiting.results()]),
    }, context.examples.chat);
    this.composer = new Composer(this.session, this.meter, context.changed, () => this.start(), context.model.inputs.includes("image"));
    this.input = this.composer.input;
    this.system = systemField(() => this.remember());
    const top = h("div", { class: "chat-top" }, h("h2", { class: "unseen" }, "Conversation"), this.system.parentElement, this.thread.toggle);
    this.element = h("div", {}, top, this.thread.element, this.composer.element, this.session.said);
    this.history = new History(context.store, {
      open: (conversation) => this.open(conversation),
      begin: () => this.begin(),
      removed: (id) => this.removed(id),
      rename: (conversation, title) => this.rename(conversation, title),
    });
    this.draw();
  }

  get messages() {
    return this.conversation.messages;
  }

  get waiting() {
    return this.thread.waiting(this.messages);
  }

  // The request that would be sent now.
  body(news = this.waiting?.results() ?? [this.composer.message]) {
    const { system, messages } = this.conversation;
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    return { model: this.context.model.id, messages: [...first, ...messages, ...news].map(asSent), ...this.context.parameters.values() };
  }

  type(text) {
    this.input.value = text;
    this.input.focus();
    this.context.changed();
  }

  // A request of a link, whose last message is still to be sent.
  fill({ messages }) {
    const turns = Array.isArray(messages) ? messages.filter((turn) => typeof turn?.content === "string") : [];
    const system = turns[0]?.role === "system" ? turns.shift().content : "";
    const last = turns.at(-1)?.role === "user" ? turns.pop().content : "";
    this.open(fresh({ system, messages: turns, parameters: this.conversation.parameters }));
    this.type(last);
  }

  open(conversation) {
    if (conversation.id === this.conversation.id) return;
    this.session.stop();
    this.session.sent = null;
    this.context.beams.start(); // the tree is that of another answer
    this.gone.delete(conversation.id);
    this.conversation = copyOf(conversation);
    const results = this.messages.splice(resultsAt(this.messages)); // without an answer they are still to be sent
    this.system.value = this.conversation.system;
    this.system.parentElement.open = this.system.value !== "";
    this.context.parameters.setAll(this.conversation.parameters);
    this.composer.clear();
    this.draw();
    if (results.length && this.waiting) this.thread.ask(this.waiting, results);
    this.thread.follower.follow();
    this.history.mark(conversation.id);
    this.context.place(this.context.store.all.has(conversation.id) ? conversation.id : null);
    if (matchMedia("(pointer: fine)").matches) this.input.focus(); // on a phone the keyboard would come up
  }

  // A new conversation, with the system message and the parameters of this one.
  begin() {
    const { system, parameters } = this.conversation;
    this.open(fresh({ system, parameters }));
  }

  split(at) {
    this.open(branch(this.conversation, at));
    this.save();
  }

  removed(id) {
    this.gone.add(id);
    if (id === this.conversation.id) this.begin();
  }

  draw() {
    this.thread.draw(this.messages);
    if (this.messages.at(-1)?.role === "user") this.thread.offer(this.messages.length);
    this.context.changed();
  }

  start() {
    const said = this.composer.message;
    if (this.session.running || !(said.content.trim() || said.images)) return;
    if (this.waiting) return this.waiting.element.requestSubmit();
    this.composer.empty();
    this.input.focus();
    this.replace([...this.messages, said], () => this.composer.restore(said));
  }

  edit(at, content) {
    const changed = { ...this.messages[at], content };
    if (changed.role === "user") return this.replace([...this.messages.slice(0, at), changed]);
    this.conversation.messages = this.messages.with(at, changed);
    this.draw();
    this.save();
  }

  // Other messages, and the model's answer to them. Where there is none, what was there comes back.
  async replace(messages, undone = () => {}) {
    if (this.session.running) return;
    this.remember();
    const { conversation, messages: before } = this;
    conversation.messages = messages;
    conversation.title ||= titleFrom(messages[0].content || messages[0].images?.[0].name || "");
    this.thread.draw(messages);
    const job = { makeBody: () => this.body([]), place: this.thread.begin(), meter: this.meter, beams: this.context.beams };
    const answers = await this.session.run(this.path, [{ ...job, onNews: this.saver(conversation), rich: true }]);
    if (!answers) conversation.messages = before;
    else if (!answers[0].isEmpty) {
      const message = answers[0].message();
      this.thread.answers.set(message, answers);
      conversation.messages = [...messages, message];
    }
    if (this.conversation === conversation) {
      this.draw();
      if (!answers) undone();
    }
    if (conversation.messages.length) await this.save(conversation);
  }

  // Saves an answer while it comes, so that a page that is closed loses little.
  saver(conversation) {
    let next = 0;
    return (answer) => {
      if (performance.now() < next) return;
      next = performance.now() + SAVE;
      this.save(conversation, Date.now(), [...conversation.messages, ...(answer.isEmpty ? [] : [answer.message()])]);
    };
  }

  // System message and parameters belong to the conversation.
  remember() {
    const { conversation } = this;
    const before = JSON.stringify(conversation);
    conversation.system = this.system.value;
    try {
      conversation.parameters = this.context.parameters.values();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error; // it is not complete yet
    }
    this.context.changed();
    if (this.messages.length && JSON.stringify(conversation) !== before) this.save(conversation, conversation.updated);
  }

  rename(conversation, title) {
    if (conversation.id === this.conversation.id) this.conversation.title = title;
    this.save({ ...conversation, title }, conversation.updated);
  }

  async save(conversation = this.conversation, updated = Date.now(), messages = conversation.messages) {
    if (this.gone.has(conversation.id)) return;
    this.context.store.part(conversation);
    conversation.updated = updated;
    try {
      await this.context.store.save({ ...conversation, messages });
      this.composer.unsaved.replaceChildren();
    } catch (error) {
      this.composer.unsaved.textContent = error.message;
    }
    if (conversation.id !== this.conversation.id) return;
    this.context.place(conversation.id);
    this.history.mark(conversation.id);
  }
}
