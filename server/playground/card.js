// The card beside a token: how probable it was, and what else might have stood there.

import { byId, h } from "./dom.js";
import { markOf } from "./words.js";

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 10 ? `${value.toFixed(1)}%` : value >= 0.01 ? `${value.toPrecision(2)}%` : "< 0.01%";
};

export const visible = (text) => markOf(text) ?? spaced(text);

const spaced = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

export function describe(span) {
  return span.tokens.map((token) => `${visible(token.text)}, ${token.logprob == null ? "not scored" : percent(token.logprob)}`).join("; ");
}

export function showCard(anchor, span) {
  const card = byId("card");
  card.replaceChildren(...span.tokens.map(tokenTable));
  card.hidden = false;
  place(card, anchor);
}

export function hideCard() {
  byId("card").hidden = true;
}

function tokenTable(token) {
  const others = token.top.some((other) => other.text === token.text) ? token.top : [token, ...token.top];
  const rows = others.map((other) => {
    const chosen = other.text === token.text;
    const bar = h("span", { class: "bar" });
    bar.style.setProperty("--share", Math.exp(other.logprob));
    return h(
      "tr",
      { class: chosen ? "chosen" : null },
      h("th", { scope: "row" }, visible(other.text), chosen && h("span", { class: "unseen" }, " (chosen)")),
      h("td", {}, percent(other.logprob), bar),
    );
  });
  return h(
    "table",
    {},
    h("caption", {}, h("b", {}, visible(token.text)), token.logprob == null ? "" : ` log-probability ${token.logprob.toFixed(3)}`),
    h("tbody", {}, rows),
  );
}

// Under the token, or above it where there is no room; never beyond the window's edge.
function place(card, anchor) {
  const at = anchor.getClientRects()[0] ?? anchor.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8));
  const below = at.bottom + 6;
  const top = below + height > window.innerHeight - 8 ? Math.max(8, at.top - height - 6) : below;
  card.style.setProperty("left", `${left + window.scrollX}px`);
  card.style.setProperty("top", `${top + window.scrollY}px`);
}
