// What was said, in an area that scrolls: each message with what can be done with it.

import { Answer } from "./answer.js";
import { shown } from "./attachments.js";
import { callsWait, resultsAt } from "./conversation.js";
import { h } from "./dom.js";
import { Follower } from "./follow.js";
import { copyText, editTurn, makeTurn } from "./turn.js";

export class Thread {
  // `actions` has again(at), edit(at, text), split(at), changed() and sendResults().
  constructor(actions, example) {
    Object.assign(this, { actions, example, answers: new WeakMap() }); // message -> answers: with tokens if made on this page
    this.log = h("div", { role: "log", "aria-label": "Conversation" });
    this.area = h("div", { class: "log", tabindex: "0", role: "group", "aria-label": "Conversation, which scrolls" }, this.log);
    this.follower = new Follower(this.area, this.log);
    const onclick = () => this.toggle.setAttribute("aria-pressed", String(this.area.classList.toggle("by-token")));
    const title = "The tokens of answers made on this page, with their alternatives";
    this.toggle = h("button", { type: "button", class: "quiet toggle", "aria-pressed": "false", title, onclick }, "Token view");
    this.element = h("div", { class: "thread" }, this.area, this.follower.button);
  }

  draw(messages) {
    const turns = messages.map((message, at) => message.role !== "tool" && this.turn(messages, at)); // a call shows its result
    this.log.replaceChildren(...turns.filter(Boolean));
    if (!messages.length) this.log.append(this.greeting());
  }

  // Where an answer comes.
  begin() {
    const place = h("div", { class: "said by-assistant" });
    this.log.append(makeTurn(place, "assistant"));
    this.follower.follow();
    return place;
  }

  // A question without an answer, after the page was left or the answer stopped.
  offer(at) {
    this.log.append(makeTurn("", "assistant", [["Answer", () => this.actions.again(at)]]));
  }

  greeting() {
    const fill = () => this.actions.fill(this.example);
    return h("div", { class: "greeting" }, h("p", {}, "Ask something, such as"), h("button", { type: "button", onclick: fill }, this.example));
  }

  turn(messages, at) {
    const { role, content, images = [] } = messages[at];
    const { actions } = this;
    const asked = role === "user";
    const copy = ["Copy", (event) => copyText(content, event.target)];
    const edit = ["Edit", () => editTurn(turn, content, asked ? "Send" : "Save", (text) => actions.edit(at, text))];
    const split = ["Branch", () => actions.split(at)];
    const acts = asked ? [copy, edit, split] : [copy, ["Regenerate", () => actions.again(at)], edit, split];
    const said = () => h("div", { class: "said by-user" }, images.map(shown), content && h("p", {}, content));
    const turn = makeTurn(asked ? said() : this.answer(messages, at), role, acts);
    return turn;
  }

  answer(messages, at) {
    const answers = this.answersOf(messages[at]);
    const next = messages.findIndex(({ role }, place) => place > at && role !== "tool");
    if (next < 0 && callsWait(messages)) this.ask(answers[0].calls);
    else answers[0].calls.show(messages.slice(at + 1, next < 0 ? messages.length : next));
    return h("div", { class: "said by-assistant" }, answers.map(({ element }) => element));
  }

  answersOf(message) {
    if (!this.answers.has(message)) this.answers.set(message, [Answer.of(message)]);
    return this.answers.get(message);
  }

  ask(calls, known = []) {
    calls.ask(known, this.actions.changed, this.actions.sendResults);
  }

  // The calls that wait for results; null where there are none.
  waiting(messages) {
    return callsWait(messages) ? this.answersOf(messages[resultsAt(messages) - 1])[0].calls : null;
  }
}
