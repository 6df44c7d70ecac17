// Images that go with the next message: chosen, pasted or dropped. In a message they are {name, url}, the URL being a data: URL.

import { h } from "./dom.js";
import { Upload } from "./uploads.js";

export class Attachments {
  // `complain` is told what is not taken.
  constructor(changed, complain) {
    Object.assign(this, { changed, complain, images: [] });
    const take = () => this.take(this.input.files).then(() => (this.input.value = ""));
    this.input = h("input", { type: "file", id: "attach", class: "unseen", accept: "image/*", multiple: true, onchange: take });
    this.button = h("label", { for: "attach", class: "quiet as-button" }, "Attach images");
    this.list = h("ul", { class: "attached", "aria-label": "Attached images" });
    this.said = h("p", { class: "unseen", role: "status" });
    this.draw();
  }

  // Files come pasted into the field, or dropped on a part of the page.
  listen(field, area) {
    field.addEventListener("paste", (event) => this.receive(event, event.clipboardData));
    area.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
    area.addEventListener("drop", (event) => this.receive(event, event.dataTransfer));
  }

  receive(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.take(data.files);
  }

  async take(files) {
    for (const file of [...files]) {
      if (!file.type.startsWith("image/")) {
        this.complain(`${file.name} is not an image.`);
        continue;
      }
      const { name, url } = await Upload.read(file);
      this.images.push({ name: name || "image", url });
      this.said.textContent = `${name || "image"} is attached.`;
    }
    this.draw();
  }

  set(images) {
    this.images = images;
    this.draw();
  }

  draw() {
    this.list.replaceChildren(...this.images.map((image, place) => this.item(image, place)));
    this.list.hidden = !this.images.length;
    this.changed();
  }

  item(image, place) {
    const remove = () => {
      this.set(this.images.toSpliced(place, 1));
      this.said.textContent = `${image.name} is removed.`;
      (this.list.querySelectorAll("button")[Math.min(place, this.images.length - 1)] ?? this.input).focus();
    };
    const button = h("button", { type: "button", class: "quiet", "aria-label": `Remove ${image.name}`, onclick: remove }, "Remove");
    return h("li", {}, shown(image), button);
  }
}

export const shown = ({ name, url }) => h("img", { src: url, alt: name });

// A message as the API reads it.
export function asSent({ images, ...message }) {
  if (!images?.length) return message;
  const parts = images.map(({ name, url }) => ({ type: "image_url", image_url: { url: new Upload(name, url) } }));
  const text = message.content ? [{ type: "text", text: message.content }] : [];
  return { ...message, content: [...parts, ...text] };
}
