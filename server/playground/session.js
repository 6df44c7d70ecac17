// What a pane that generates shares with the others: start and stop, answers, speed, and what went wrong.

import { ApiError } from "./api.js";
import { Answer } from "./answer.js";
import { h } from "./dom.js";
import { FieldError } from "./fields.js";
import { generate } from "./stream.js";
import { prose } from "./words.js";

export class Session {
  constructor(context, startLabel) {
    this.context = context;
    this.startButton = h("button", { type: "submit", class: "primary" }, startLabel);
    this.stopButton = h("button", { type: "button", class: "stop", disabled: true, onclick: () => this.stop() }, "Stop");
    this.problem = h("p", { class: "problem", role: "alert" });
    this.said = h("p", { class: "unseen", role: "status" });
    this.abort = null;
    this.sent = null; // the request of the answer that is shown
  }

  get running() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  // Each job is {makeBody, place, meter, beams, onNews, rich}: its place is filled with the answers to what it asks. Jobs run beside
  // each other. Gives the answers of the first, or null where there are none.
  async run(path, jobs, given = "") {
    if (this.running) return null;
    this.problem.replaceChildren();
    let bodies;
    try {
      bodies = jobs.map((job) => job.makeBody());
    } catch (error) {
      this.explain(error);
      return null;
    }
    const before = this.sent;
    this.sent = bodies[0];
    this.begin(jobs);
    try {
      const [answers] = await Promise.all(jobs.map((job, place) => this.follow(path, bodies[place], job, given)));
      if (!answers) this.sent = before;
      return answers;
    } finally {
      this.end(jobs);
    }
  }

  async follow(path, chosen, { place, meter, beams, onNews, rich }, given) {
    const body = { ...chosen, ...this.context.extras(path), stream: true };
    body.stream_options = { include_usage: true, continuous_usage_stats: true };
    const answers = new Map();
    let searches = false;
    const answer = (index, many) => {
      if (!answers.has(index)) {
        const made = new Answer(many ? `Answer ${index + 1}` : "Answer", rich);
        if (given) made.precede(given);
        answers.set(index, made);
        place.append(made.element);
      }
      return answers.get(index);
    };
    const many = (body.n ?? 1) > 1;
    answer(0, many);
    try {
      for await (const news of generate(path, body, this.abort.signal)) {
        if (news.id) this.context.mine(news.id);
        if (news.beams) {
          searches = true;
          beams?.feed(news.beams);
        }
        for (const piece of news.pieces) answer(piece.index, many).feed(piece);
        onNews?.(answers.get(0));
        meter.feed(news.usage, searches);
      }
      this.said.textContent = `The answer is complete: ${meter.tokens ?? 0} tokens.`;
      return [...answers.values()];
    } catch (error) {
      if (error.name === "AbortError") {
        for (const item of answers.values()) if (!item.end.textContent) item.close("stopped");
        this.said.textContent = "Stopped.";
        return [...answers.values()];
      }
      if (![...answers.values()].some((item) => !item.isEmpty)) place.replaceChildren();
      this.explain(error);
      return null;
    }
  }

  begin(jobs) {
    this.abort = new AbortController();
    this.startButton.disabled = true;
    this.stopButton.disabled = false;
    this.said.textContent = "Generating.";
    for (const { place, meter, beams } of jobs) {
      place.setAttribute("aria-busy", "true");
      meter.start();
      beams?.start();
    }
    this.context.changed();
  }

  end(jobs) {
    // A button that is disabled under the finger loses the focus: it goes where one can go on.
    const lost = document.activeElement === this.stopButton;
    this.abort = null;
    this.startButton.disabled = false;
    if (lost) this.startButton.focus();
    this.stopButton.disabled = true;
    for (const { place, beams } of jobs) {
      place.removeAttribute("aria-busy");
      beams?.end();
    }
    this.context.changed();
  }

  explain(error) {
    const known = error instanceof ApiError || error instanceof FieldError;
    this.problem.replaceChildren(...prose(known ? error.message : "The server cannot be reached, or broke off."));
    if (this.context.parameters.fields.has(error.param)) {
      const show = h("button", { type: "button", class: "quiet" }, `Show ${error.param}`);
      show.addEventListener("click", () => this.context.parameters.point(error.param));
      this.problem.append(" ", show);
    }
    if (!known) console.warn(error);
  }
}
