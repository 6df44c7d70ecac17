// What a pane that generates shares with the others: start and stop, answers, speed, and what went wrong.

import { ApiError } from "./api.js";
import { Answer } from "./answer.js";
import { h } from "./dom.js";
import { FieldError } from "./fields.js";
import { Meter } from "./meter.js";
import { generate } from "./stream.js";

export class Session {
  constructor(context, startLabel) {
    this.context = context;
    this.meter = new Meter();
    this.startButton = h("button", { type: "submit", class: "primary" }, startLabel);
    this.stopButton = h("button", { type: "button", class: "stop", disabled: true, onclick: () => this.stop() }, "Stop");
    this.problem = h("p", { class: "problem", role: "alert" });
    this.said = h("p", { class: "unseen", role: "status" });
    this.abort = null;
  }

  get running() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  // Fills `place` with the answers to what `makeBody` makes; gives the texts, or null where there are none.
  async run(path, makeBody, place, given = "") {
    if (this.running) return null;
    this.problem.replaceChildren();
    const answers = new Map();
    let searches = false;
    const answer = (index, many) => {
      if (!answers.has(index)) {
        const made = new Answer(many ? `Answer ${index + 1}` : "Answer");
        if (given) made.precede(given);
        answers.set(index, made);
        place.append(made.element);
      }
      return answers.get(index);
    };
    try {
      const body = { ...makeBody(), ...this.context.extras(path), stream: true };
      this.begin(place);
      body.stream_options = { include_usage: true, continuous_usage_stats: true };
      const many = (body.n ?? 1) > 1;
      answer(0, many);
      for await (const news of generate(path, body, this.abort.signal)) {
        if (news.id) this.context.mine(news.id);
        if (news.beams) {
          searches = true;
          this.context.beams.feed(news.beams);
        }
        for (const piece of news.pieces) answer(piece.index, many).feed(piece);
        this.meter.feed(news.usage, searches);
      }
      this.said.textContent = `The answer is complete: ${this.meter.tokens ?? 0} tokens.`;
      return [...answers.values()].map((item) => item.text);
    } catch (error) {
      if (error.name === "AbortError") {
        for (const item of answers.values()) if (!item.end.textContent) item.close("stopped");
        this.said.textContent = "Stopped.";
        return answers.size ? [...answers.values()].map((item) => item.text) : null;
      }
      if (answers.size && ![...answers.values()].some((item) => item.text)) place.replaceChildren();
      this.explain(error);
      return null;
    } finally {
      this.end(place);
    }
  }

  begin(place) {
    this.abort = new AbortController();
    this.startButton.disabled = true;
    this.stopButton.disabled = false;
    this.said.textContent = "Generating.";
    place.setAttribute("aria-busy", "true");
    this.meter.start();
    this.context.beams.start();
  }

  end(place) {
    // A button that is disabled under the finger loses the focus: it goes where one can go on.
    const lost = document.activeElement === this.stopButton;
    this.abort = null;
    this.startButton.disabled = false;
    if (lost) this.startButton.focus();
    this.stopButton.disabled = true;
    place.removeAttribute("aria-busy");
    this.context.beams.end();
  }

  explain(error) {
    const known = error instanceof ApiError || error instanceof FieldError;
    const message = known ? error.message : "The server cannot be reached, or broke off.";
    this.problem.replaceChildren(message);
    if (this.context.parameters.fields.has(error.param)) {
      const show = h("button", { type: "button", class: "quiet" }, `Show ${error.param}`);
      show.addEventListener("click", () => this.context.parameters.point(error.param));
      this.problem.append(" ", show);
    }
    if (!known) console.warn(error);
  }
}
