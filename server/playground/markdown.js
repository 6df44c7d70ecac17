// Markdown as elements. The library gives a list of tokens and no HTML; only the elements named here are made of it, with
// no attributes but these. HTML in the text is text.

import { codeBlock } from "./code_block.js";
import { h } from "./dom.js";
import MarkdownIt from "./vendor/markdown-it.js";

const parser = new MarkdownIt({ html: false, linkify: true, breaks: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }); // "main.py" is no address

const PLAIN = new Set(["p", "ul", "ol", "li", "blockquote", "strong", "em", "s", "table", "thead", "tbody", "tr", "th", "td", "hr", "br"]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

// The address, if a reader may be sent there.
function safe(address) {
  try {
    return SCHEMES.has(new URL(address).protocol) ? address : null;
  } catch {
    return null; // relative: it would lead into this server
  }
}

const link = (address) => (safe(address) ? h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }) : h("span"));

// Levels follow each other, below the page's own.
class Builder {
  level = 2;

  open(token) {
    const { tag, attrs } = token;
    if (tag === "a") return link(token.attrGet("href"));
    if (/^h[1-6]$/.test(tag)) {
      this.level = Math.min(Number(tag[1]) + 2, this.level + 1, 6);
      return h(`h${this.level}`);
    }
    if (!PLAIN.has(tag)) return h("span");
    const start = tag === "ol" ? Number(token.attrGet("start") ?? 1) : 1;
    const side = /^text-align:(left|center|right)$/.exec(attrs?.find(([name]) => name === "style")?.[1] ?? "")?.[1];
    return h(tag, { class: side && `at-${side}`, start: start === 1 ? null : start });
  }

  // What has nothing within it that is made by other tokens.
  leaf(token) {
    const { type, content } = token;
    if (type === "softbreak" || type === "hardbreak") return h("br");
    if (type === "hr") return h("hr");
    if (type === "code_inline") return h("code", {}, content);
    if (type === "fence" || type === "code_block") return codeBlock(content.replace(/\n$/, ""), token.info.trim().split(/\s/)[0]);
    if (type !== "image") return content;
    // Not shown: an image of another place would tell that place what is read here.
    const shown = link(token.attrGet("src"));
    shown.append(`image: ${content || token.attrGet("src")}`);
    return shown;
  }

  build(tokens, top) {
    const path = [top];
    for (const token of tokens) {
      const here = path.at(-1);
      if (token.hidden) continue; // the paragraphs of a tight list
      if (token.type === "inline") this.build(token.children, here);
      else if (token.nesting === 1) {
        const element = this.open(token);
        const wide = token.tag === "table";
        here.append(wide ? h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, element) : element);
        path.push(element);
      } else if (token.nesting === -1) path.pop();
      else here.append(this.leaf(token));
    }
  }
}

// Shows a text in an element; parts that stay the same stay, with what is selected in them.
export function showMarkdown(element, text) {
  const made = h("div");
  new Builder().build(parser.parse(text, {}), made);
  const parts = [...made.childNodes];
  const same = parts.findIndex((part, place) => !element.childNodes[place]?.isEqualNode(part));
  if (same < 0 && parts.length === element.childNodes.length) return;
  const first = same < 0 ? parts.length : same;
  while (element.childNodes.length > first) element.lastChild.remove();
  element.append(...parts.slice(first));
}
