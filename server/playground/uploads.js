// A file that a visitor chose. In a request it is a data: URL; a listing names it instead.

import { h, newId } from "./dom.js";

export class Upload {
  constructor(name, url) {
    Object.assign(this, { name, url });
  }

  static async read(file) {
    const url = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
    return new Upload(file.name, url);
  }

  toJSON() {
    return this.url;
  }
}

// The body with something else in place of files.
export const withoutFiles = (body, instead) =>
  JSON.stringify(body, function (key, value) {
    return this[key] instanceof Upload ? instead(this[key]) : value;
  });

export function filePicker(label, accept, onChange) {
  const id = newId("file");
  const input = h("input", { type: "file", id, accept, onchange: onChange });
  return { input, element: h("div", { class: "file" }, h("label", { for: id, class: "caption" }, label), input) };
}
