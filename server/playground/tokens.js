// Which tokens a piece of text is made of. Most stand in it as they are; the first may lack its space, a character may
// be made of several, and special ones are not shown.

export class Aligner {
  constructor() {
    this.text = "";
    this.tokens = [];
  }

  // Takes news, gives spans {text, tokens} whose texts add up to all text so far; `last` empties it.
  feed(text, tokens, last = false) {
    this.text += text;
    this.tokens.push(...tokens);
    const spans = [];
    while (this.text && this.tokens.length) {
      const [token] = this.tokens;
      const shown = [token.text, token.text.trimStart()].find((form) => form && this.text.startsWith(form));
      if (shown === undefined) break;
      spans.push({ text: shown, tokens: [token] });
      this.text = this.text.slice(shown.length);
      this.tokens.shift();
    }
    // A text comes no earlier than its tokens: what cannot be told apart stays together.
    if (this.text) spans.push({ text: this.text, tokens: this.tokens.splice(0) });
    this.text = "";
    if (last) for (const token of this.tokens.splice(0)) spans.push({ text: "", tokens: [token] });
    return spans;
  }
}
