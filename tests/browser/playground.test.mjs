// What a visitor does: type, stream, stop, look at tokens, beams and pages, copy the code, with mouse, keys and phone.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { after, afterEach, before, beforeEach, test } from "node:test";
import { promisify } from "node:util";
import { complete, launch, open, set } from "./browser.mjs";

const URL_ = process.env.OCTAVO_URL;
const KEY_URL = process.env.OCTAVO_KEY_URL;
const KEY = process.env.OCTAVO_KEY;
const SILENT_URL = process.env.OCTAVO_SILENT_URL;
const LONG = { max_tokens: 400, ignore_eos: true };

let browser;
let tab;

before(async () => (browser = await launch()));
after(() => browser.close());
beforeEach(async () => {
  tab = await open(browser, URL_);
  await tab.page.waitForSelector('[role="tab"]');
});
afterEach(async () => {
  const { complaints, expected } = tab;
  await tab.context.close();
  assert.deepEqual(complaints.filter((text) => !expected?.test(text)), []);
});

const mode = (page, name) => page.click(`#tab-${name}`);
const ended = (page, pane) => page.waitForSelector(`#pane-${pane} .answer:last-child .end[data-finish]`);
// Without the marks that stand for tokens that are not shown.
const answers = (page, pane) =>
  page.locator(`#pane-${pane} .answer .tokens`).evaluateAll((all) =>
    all.map((one) => [...one.childNodes].filter((node) => !node.classList?.contains("special")).map((node) => node.textContent).join("")),
  );
const metric = async (name) => {
  const text = await (await fetch(`${URL_}/metrics`)).text();
  return Number(text.split("\n").find((line) => line.startsWith(`${name} `))?.split(" ").at(-1) ?? 0);
};

test("a prompt is typed, streamed and measured", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await set(page, { max_tokens: 24, ignore_eos: "true", temperature: 0 });
  await page.fill("#prompt", "The child");
  await page.press("#prompt", "Control+Enter");
  await ended(page, "prompt");
  const [shown] = await answers(page, "prompt");
  const expected = await complete(URL_, { prompt: "The child", max_tokens: 24, ignore_eos: true, temperature: 0 });
  assert.equal(shown, `The child${expected.choices[0].text}`);
  const reading = (name) => page.textContent(`#pane-prompt [data-reading="${name}"]`);
  assert.match(await reading("first"), /^first token after \d+(\.\d+)? m?s$/);
  assert.match(await reading("rate"), /^\d+(\.\d+)? tokens\/s$/);
  assert.equal(await reading("count"), "24 tokens");
});

test("a conversation goes on from what was said", async () => {
  const { page } = tab;
  await mode(page, "chat");
  await set(page, { max_tokens: 12, temperature: 0 });
  await page.fill("#message", "Hello");
  await page.press("#message", "Enter");
  await ended(page, "chat");
  await page.fill("#message", "And then?");
  await page.click("#pane-chat .primary");
  await page.waitForFunction(() => document.querySelectorAll("#pane-chat .end[data-finish]").length === 2);
  const [first] = await answers(page, "chat");
  const code = await page.textContent(".listing code");
  assert.ok(code.includes('"role":"assistant"'));
  assert.ok(first.length > 0);
  await page.click("text=New conversation");
  assert.equal(await page.locator("#pane-chat .answer").count(), 0);
});

test("stop breaks an answer off, on the server, too", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await set(page, { ...LONG, ignore_eos: "true", n: 4 });
  const aborted = () => metric('octavo_requests_aborted_total{reason="disconnect"}');
  const stops = async () => {
    const before = await aborted();
    // As soon as there is a token: a click from outside might come too late for so small a model.
    await page.evaluate(() => {
      const stop = document.querySelector("#pane-prompt .stop");
      new MutationObserver((_, observer) => {
        if (!document.querySelector("#pane-prompt .token")) return;
        observer.disconnect();
        stop.click();
      }).observe(document.querySelector("#pane-prompt .output"), { childList: true, subtree: true });
    });
    await page.click("#pane-prompt .primary");
    await ended(page, "prompt");
    await page.waitForSelector("#pane-prompt .stop:disabled", { state: "attached" });
    if (!(await page.locator('#pane-prompt .end[data-finish="stopped"]').count())) return false;
    for (let wait = 0; (await aborted()) === before && wait < 100; wait++) await new Promise((done) => setTimeout(done, 50));
    return (await aborted()) > before;
  };
  // On a busy machine the answer may be complete before the page, or the server, is told.
  let stopped = false;
  for (let attempt = 0; !stopped && attempt < 10; attempt++) stopped = await stops();
  assert.ok(stopped);
  // It can be asked again at once.
  await set(page, { max_tokens: 3, n: 1 });
  await page.click("#pane-prompt .primary");
  await page.waitForSelector('#pane-prompt .end[data-finish="length"]');
});

test("each token has its probability and its alternatives, by key, too", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await set(page, { max_tokens: 8, ignore_eos: "true", temperature: 0 });
  await page.click("#pane-prompt .primary");
  await ended(page, "prompt");
  const tokens = page.locator("#pane-prompt .token");
  await tokens.nth(0).hover();
  await page.waitForSelector("#card:not([hidden])");
  const shares = await page.locator("#card td").allTextContents();
  assert.ok(shares.length >= 5 && shares.every((text) => /%$/.test(text)));
  await tokens.nth(0).focus();
  const first = await page.textContent("#card caption");
  await page.keyboard.press("End");
  assert.notEqual(await page.evaluate(() => document.activeElement.tabIndex), -1);
  assert.equal(await page.evaluate(() => document.querySelectorAll('#pane-prompt .token[tabindex="0"]').length), 1);
  await page.keyboard.press("Home");
  assert.equal(await page.textContent("#card caption"), first);
  await page.keyboard.press("Escape");
  assert.ok(await page.locator("#card").isHidden());
  assert.match(await tokens.nth(0).getAttribute("aria-label"), /%/);
});

test("beams grow as a tree and settle", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await page.click('.presets button:has-text("Beams")');
  await set(page, { max_tokens: 16 });
  await page.evaluate(() => {
    window.most = 0;
    new MutationObserver(() => (window.most = Math.max(window.most, Number(document.querySelector("#beams").dataset.live ?? 0)))).observe(
      document.querySelector("#beams"), { attributes: true },
    );
  });
  await page.fill("#prompt", "One captain");
  await page.click("#pane-prompt .primary");
  await ended(page, "prompt");
  await page.waitForSelector("#beams .best");
  const chosen = await page.locator("#beams .best").first().textContent();
  assert.match(chosen, /chosen/);
  assert.ok(Number(await page.getAttribute("#beams", "data-ended")) >= 1);
  const { choices } = await complete(URL_, { prompt: "One captain", num_beams: 4, max_tokens: 16 });
  const [shown] = await answers(page, "prompt");
  assert.ok(shown.startsWith(`One captain${choices[0].text}`));
});

test("the cache is a map: held while requests run, cached after them", async () => {
  const { page } = tab;
  await page.waitForSelector("#machine-view:not([hidden])");
  let on = true;
  const busy = (async () => {
    while (on) await Promise.all([0, 1, 2].map((seed) => complete(URL_, { prompt: "One captain carries a stone over the bridge", ...LONG, n: 3, temperature: 1, seed })));
  })();
  await page.waitForFunction(() => Number(document.querySelector("#machine").dataset.held) > 0 && document.querySelectorAll("#requests .swatch").length > 0);
  assert.match(await page.locator("#requests li code").first().textContent(), /^[0-9a-f]{5}$/);
  on = false;
  await busy;
  await page.waitForFunction(() => Number(document.querySelector("#machine").dataset.held) === 0);
  assert.ok(Number(await page.getAttribute("#machine", "data-cached")) > 0);
  const canvas = page.locator("#map canvas");
  await canvas.focus();
  await page.keyboard.press("ArrowRight");
  assert.match(await page.textContent("#map .note"), /^Pages? 1.*(free|cached|held)/);
  await page.keyboard.press("ArrowRight");
  assert.match(await page.textContent("#map .note"), /^Pages? \d+/);
  assert.match(await canvas.getAttribute("aria-label"), /^\d+ pages: \d+ held, \d+ cached, \d+ free$/);
});

test("every parameter of the API stands in the form, with what it means", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  const shown = await page.locator("#parameters .field").evaluateAll((fields) => fields.map((field) => [field.querySelector("label code").textContent, field.querySelector(".meaning").textContent]));
  const { components } = await (await fetch(`${URL_}/openapi.json`)).json();
  const own = ["model", "prompt", "stream", "stream_options", "suffix", "stream_beams", "logprobs", "prompt_logprobs", "return_token_ids"];
  const known = Object.keys(components.schemas.CompletionRequest.properties).filter((name) => !own.includes(name));
  assert.deepEqual(shown.map(([name]) => name).sort(), known.sort());
  for (const [name, meaning] of shown) {
    const said = components.schemas.CompletionRequest.properties[name].description;
    assert.equal(meaning.toLowerCase(), said.toLowerCase(), name);
  }
});

test("the code is the present request, and runs", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await page.fill("#prompt", "It's a \"quiet\" day\n&");
  await set(page, { max_tokens: 5, temperature: 0, seed: 7, stop: "zzz" });
  const curl = await page.locator(".listing code").first().textContent();
  const { stdout } = await promisify(execFile)("sh", ["-c", curl]);
  const text = stdout.split("\n\n").filter((block) => block.startsWith("data: {")).map((block) => JSON.parse(block.slice(6)).choices[0]?.text ?? "").join("");
  const { choices } = await complete(URL_, { prompt: "It's a \"quiet\" day\n&", max_tokens: 5, temperature: 0, seed: 7 });
  assert.equal(text, choices[0].text);
  const python = await page.locator(".listing code").nth(1).textContent();
  assert.ok(python.includes("client.completions.create(") && python.includes("max_tokens=5"));
  if (process.env.PYTHON) {
    const ran = await promisify(execFile)(process.env.PYTHON, ["-c", python]);
    assert.equal(ran.stdout, choices[0].text);
  }
});

test("what the server refuses is said in its words, and the field is shown", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await set(page, { max_tokens: 100000 });
  tab.expected = /status of 400/; // the browser logs it
  await page.click("#pane-prompt .primary");
  await page.waitForSelector('#pane-prompt [role="alert"]:not(:empty)');
  assert.match(await page.textContent('#pane-prompt [role="alert"]'), /max_model_len/);
});

test("by keyboard alone", async () => {
  const { page } = tab;
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.className), "skip");
  await page.locator('[role="tab"][aria-selected="true"]').focus();
  const start = await page.evaluate(() => document.activeElement.id);
  await page.keyboard.press("ArrowRight");
  assert.notEqual(await page.evaluate(() => document.activeElement.id), start);
  assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-selected")), "true");
  const outline = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
  assert.notEqual(outline, "none");
  const nameless = await page.evaluate(() =>
    [...document.querySelectorAll("button, input, select, textarea, canvas, a")].filter((element) => {
      const label = element.labels?.length || element.textContent.trim() || element.getAttribute("aria-label");
      return !label;
    }).map((element) => element.outerHTML),
  );
  assert.deepEqual(nameless, []);
});

test("tokens are found in the text that they make", async () => {
  const { page } = tab;
  const found = await page.evaluate(async () => {
    const { Aligner } = await import("/playground/tokens.js");
    const token = (text) => ({ text, logprob: -1, top: [] });
    const run = (...news) => {
      const aligner = new Aligner();
      const spans = news.flatMap(([text, tokens, last]) => aligner.feed(text, tokens.map(token), last));
      return spans.map((span) => [span.text, span.tokens.map((item) => item.text)]);
    };
    return {
      plain: run(["One day", ["One", " day"]], [".", ["."], true]),
      space: run(["One", [" One"]], ["", ["</s>"], true]),
      held: run(["", ["A"]], ["", ["B"]], ["AB!", ["!"], true]),
      parts: run(["", ["\ufffd"]], ["é", ["\ufffd"]], ["x", ["x"], true]),
      nothing: run(["text", []], [" only", [], true]),
      special: run(["a", ["a"]], ["", ["<x>"]], ["b", ["b"], true]),
    };
  });
  assert.deepEqual(found, {
    plain: [["One", ["One"]], [" day", [" day"]], [".", ["."]]],
    space: [["One", [" One"]], ["", ["</s>"]]],
    held: [["A", ["A"]], ["B", ["B"]], ["!", ["!"]]],
    parts: [["é", ["\ufffd", "\ufffd"]], ["x", ["x"]]],
    nothing: [["text", []], [" only", []]],
    special: [["a", ["a"]], ["b", ["<x>", "b"]]],
  });
});

test("a label is the end of a CRC-32", async () => {
  const label = await tab.page.evaluate(async () => (await import("/playground/labels.js")).labelOf("123456789"));
  assert.equal(label, "cbf43926".slice(-5)); // the check value of the standard
});

for (const colorScheme of ["light", "dark"]) {
  test(`nothing overflows on a phone, ${colorScheme}`, async () => {
    const phone = await open(browser, URL_, { viewport: { width: 320, height: 640 }, colorScheme, hasTouch: true, isMobile: true, reducedMotion: "reduce" });
    const { page } = phone;
    await page.waitForSelector('[role="tab"]');
    await page.click("#settings-box > summary");
    assert.ok(await page.locator('#parameters [name="temperature"]').isVisible());
    await page.waitForSelector("#machine-view:not([hidden])");
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= 320, `${width} pixels wide`);
    await phone.context.close();
    assert.deepEqual(phone.complaints, []);
  });
}

test("a server with a key asks for it, and keeps it in this tab only", { skip: !KEY_URL }, async () => {
  const locked = await open(browser, KEY_URL);
  const { page } = locked;
  await page.waitForSelector("#key-form:not([hidden])");
  assert.equal(await page.textContent("#model"), "An API key is needed.");
  assert.deepEqual(locked.complaints, [], "nothing is asked for without a key");
  await page.fill("#key-field", "wrong");
  await page.press("#key-field", "Enter");
  await page.waitForFunction(() => /not valid/.test(document.querySelector("#key-problem").textContent));
  await page.fill("#key-field", KEY);
  await page.press("#key-field", "Enter");
  await page.waitForSelector('[role="tab"]');
  await page.waitForSelector("#machine-view:not([hidden])");
  assert.equal(await page.evaluate(() => localStorage.length), 0);
  assert.deepEqual(await page.evaluate(() => Object.values(sessionStorage)), [KEY]);
  assert.deepEqual(await locked.context.cookies(), []);
  assert.ok((await page.textContent(".listing code")).includes("$OCTAVO_API_KEY"));
  assert.ok(!(await page.content()).includes(KEY));
  await locked.context.close();
  assert.deepEqual(locked.complaints.filter((text) => !/401/.test(text)), []);
});

test("a feed that is switched off is not asked for", { skip: !SILENT_URL }, async () => {
  const silent = await open(browser, SILENT_URL);
  await silent.page.waitForSelector('[role="tab"]');
  await silent.page.waitForFunction(() => /switched off/.test(document.querySelector("#feed-state").textContent));
  assert.ok(await silent.page.locator("#feed-state").isVisible());
  await silent.context.close();
  assert.deepEqual(silent.complaints, []);
});

test("the API's documentation works under its policy", async () => {
  const { page } = tab;
  await page.goto(`${URL_}/docs`);
  const block = page.locator(".opblock", { hasText: "/v1/completions" }).first();
  await block.locator(".opblock-summary").click();
  await block.getByText("Try it out").click();
  await block.locator("textarea.body-param__text").fill(JSON.stringify({ prompt: "Once", max_tokens: 4 }));
  await block.locator("button.execute").click();
  await block.locator(".live-responses-table .microlight").first().waitFor();
  assert.match(await block.locator(".live-responses-table").innerText(), /"completion_tokens": 4/);
});

test("a page of another site cannot ask", async () => {
  const context = await browser.newContext();
  const page = await context.newPage();
  const other = new URL(URL_);
  other.hostname = other.hostname === "localhost" ? "127.0.0.1" : "localhost"; // another site, of this machine
  await page.goto(`${other.origin}/health`);
  const asked = [];
  page.on("response", (response) => asked.push(response.status()));
  // What needs no preflight, so that it is sent.
  const ask = (url) => fetch(url, { method: "POST", mode: "no-cors", body: '{"prompt": "a"}' }).then((answer) => answer.type);
  assert.equal(await page.evaluate(ask, `${URL_}/v1/completions`), "opaque");
  await context.close();
  assert.deepEqual(asked, [403]);
});
