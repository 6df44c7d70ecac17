// Sound in, and what is said in it out.

import { askJson } from "./api.js";
import { h } from "./dom.js";
import { Session } from "./session.js";
import { Upload, filePicker } from "./uploads.js";

export class SpeechPane {
  name = "speech";
  title = "Transcribe";
  path = "/v1/audio/transcriptions";
  schema = null;

  constructor(context) {
    this.context = context;
    this.session = new Session(context, "Transcribe");
    this.picker = filePicker("A file: wav, flac, mp3 or ogg", "audio/*", () => context.changed());
    const plain = { placeholder: "found by itself", spellcheck: "false", autocapitalize: "off" };
    this.language = h("input", { id: "language", ...plain, oninput: context.changed });
    this.output = h("p", { class: "output tokens", role: "status", "aria-label": "What is said" });
    this.form = h(
      "form",
      { onsubmit: (event) => (event.preventDefault(), this.start()) },
      this.picker.element,
      h("label", { for: "language", class: "caption" }, "Language, such as en"),
      this.language,
      h("div", { class: "row" }, this.session.startButton),
    );
    this.element = h("div", {}, this.form, this.session.problem, this.output);
  }

  body() {
    const [file] = this.picker.input.files;
    const language = this.language.value.trim();
    const body = { model: this.context.model.id, file: new Upload(file?.name ?? "sound.wav", null) };
    return language ? { ...body, language } : body;
  }

  async start() {
    const [file] = this.picker.input.files;
    this.session.problem.textContent = file ? "" : "Choose a file first.";
    if (!file) return;
    const sent = this.body();
    const body = new FormData();
    for (const [name, value] of Object.entries({ ...sent, file })) body.append(name, value);
    this.session.startButton.disabled = true;
    try {
      const answer = await askJson(this.path, { body });
      this.output.textContent = answer.text || "(nothing is said)";
      this.session.sent = sent;
    } catch (error) {
      this.session.explain(error);
    } finally {
      this.session.startButton.disabled = false;
    }
    this.context.changed();
  }
}
