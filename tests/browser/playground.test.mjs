// What a visitor does: type, stream, stop, look at tokens, beams and pages, copy the code, with mouse, keys and phone.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, afterEach, before, beforeEach, test } from "node:test";
import { promisify } from "node:util";
import { complete, launch, open, set } from "./browser.mjs";

const URL_ = process.env.OCTAVO_URL;
const KEY_URL = process.env.OCTAVO_KEY_URL;
const KEY = process.env.OCTAVO_KEY;
const IMAGES_URL = process.env.OCTAVO_IMAGES_URL;
const SPEECH_URL = process.env.OCTAVO_SPEECH_URL;
const PICTURE = Buffer.from(
  "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAGUlEQVR4nGNkYIiSY2DARCwMcgxYweCUAAA7mwIcPKI4XgAAAABJRU5ErkJggg==",
  "base64",
);
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
  await page.click("#new");
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
  assert.ok(!/<|>/.test(await page.textContent("#beams")), "ends are told by their scores");
  const { choices } = await complete(URL_, { prompt: "One captain", num_beams: 4, max_tokens: 16 });
  const [shown] = await answers(page, "prompt");
  assert.ok(shown.startsWith(`One captain${choices[0].text}`));
  await mode(page, "chat");
  const [tree, input] = await page.evaluate(() => ["#beams", "#message"].map((name) => document.querySelector(name).getBoundingClientRect().toJSON()));
  assert.ok(tree.height > 0 && tree.bottom <= input.top && input.bottom <= 900, "the input stays at the bottom");
});

test("the cache is a map: held while requests run, cached after them", async () => {
  const { page } = tab;
  assert.ok(await page.locator("#gauges").isHidden(), "folded at first");
  await page.click("#machine-box > summary");
  await page.waitForSelector("#machine-view:not([hidden])");
  assert.ok(await page.locator("#map canvas").isHidden(), "a bar is enough at first");
  await page.click("#machine-view summary");
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
  assert.match(await page.textContent("#map .note"), /^Pages? 1.*(free|kept|in use)/);
  await page.keyboard.press("ArrowRight");
  assert.match(await page.textContent("#map .note"), /^Pages? \d+/);
  assert.match(await canvas.getAttribute("aria-label"), /^\d+ pages: \d+ in use, \d+ kept, \d+ free$/);
  assert.match(await page.getAttribute("#shares", "aria-label"), /^Cache: [\d.]+% in use, [\d.]+% kept, [\d.]+% free$/);
  const gauges = await page.locator("#gauges > div").evaluateAll((all) => all.map((one) => [one.querySelector("dt").textContent, one.querySelector(".hint").textContent]));
  assert.deepEqual(gauges.map(([name]) => name), ["in use", "kept", "free", "a page", "steps"]);
  assert.ok(gauges.every(([, meaning]) => meaning.length > 20));
});

test("every parameter of the API stands in the form, with what it means", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  const shown = await page.locator("#parameters .field").evaluateAll((fields) => fields.map((field) => [field.querySelector("label code").textContent, field.querySelector(".meaning").textContent]));
  const { components } = await (await fetch(`${URL_}/openapi.json`)).json();
  const own = [
    "model", "prompt", "stream", "stream_options", "suffix", "stream_beams", "logprobs", "prompt_logprobs", "return_token_ids",
    "return_tokens_as_token_ids",
  ];
  const known = Object.keys(components.schemas.CompletionRequest.properties).filter((name) => !own.includes(name));
  assert.deepEqual(shown.map(([name]) => name).sort(), known.sort());
  for (const [name, meaning] of shown) {
    const said = components.schemas.CompletionRequest.properties[name].description ?? "";
    assert.equal(meaning.toLowerCase(), said.toLowerCase().replaceAll("`", ""), name);
  }
});

test("parameters are folded at first, the way to decode is marked, and defaults are the model's", async () => {
  const { page } = tab;
  const marked = () => page.locator('.presets [aria-pressed="true"]').allTextContents();
  assert.equal(await page.getAttribute("#settings-box", "open"), null);
  const { decoding } = (await (await fetch(`${URL_}/v1/models`)).json()).data[0];
  const shown = (name) => page.getAttribute(`#parameters [name="${name}"]`, "placeholder");
  assert.ok(decoding.temperature > 0);
  assert.deepEqual(await marked(), ["Sampling"]);
  for (const name of ["temperature", "top_p", "top_k", "num_beams", "repetition_penalty"]) assert.equal(await shown(name), String(decoding[name]));
  assert.equal(await page.textContent('#parameters [name="ignore_eos"] option'), "default: false");
  assert.equal(await shown("max_tokens"), "what fits");
  await set(page, { temperature: 0 });
  assert.deepEqual(await marked(), ["Greedy"]);
  await set(page, { num_beams: 3 });
  assert.deepEqual(await marked(), ["Beams"]);
  await page.click('.presets button:has-text("Sampling")');
  assert.deepEqual(await marked(), ["Sampling"]);
  const meanings = await page.locator("#parameters .meaning").allTextContents();
  assert.ok(meanings.length > 20 && !meanings.some((text) => text.includes("`")));
  assert.ok(await page.locator("#parameters .meaning code").count());
});

test("the same request is that of the answer shown", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  const code = () => page.locator(".listing code").first().textContent();
  assert.equal(await page.textContent("#code-title"), "This request");
  await set(page, { max_tokens: 3, seed: 5 });
  await page.fill("#prompt", "The child");
  await page.click("#pane-prompt .primary");
  await ended(page, "prompt");
  assert.equal(await page.textContent("#code-title"), "The same request");
  const sent = await code();
  assert.ok(sent.includes('"prompt":"The child"') && sent.includes('"seed":5'));
  await page.fill("#prompt", "Another");
  await set(page, { seed: 6 });
  assert.equal(await code(), sent);
  await mode(page, "chat");
  assert.ok((await code()).includes('"messages"'));
  await mode(page, "prompt");
  assert.equal(await code(), sent);
  await set(page, { max_tokens: 100000 });
  tab.expected = /status of 400/;
  await page.click("#pane-prompt .primary");
  await page.waitForSelector('#pane-prompt [role="alert"]:not(:empty)');
  assert.equal(await page.textContent("#code-title"), "This request", "no answer is shown");
  assert.ok((await code()).includes('"prompt":"Another"'));
});

test("a function is called, and its result is the next message", async () => {
  const { page } = tab;
  const parameters = { type: "object", properties: { expression: { type: "string" } }, required: ["expression"], additionalProperties: false };
  await set(page, { tools: JSON.stringify([{ type: "function", function: { name: "calculate", parameters } }]), tool_choice: "required", temperature: 0 });
  await page.fill("#message", "What is 12 + 30?");
  await page.press("#message", "Enter");
  await ended(page, "chat");
  assert.equal(await page.textContent("#pane-chat .call p"), "Calls calculate");
  assert.equal(typeof JSON.parse(await page.textContent("#pane-chat .call pre")).expression, "string");
  assert.equal(await page.locator("#pane-chat .token").count(), 0, "the tokens of a call are no text");
  await set(page, { tool_choice: "none" });
  await page.getByLabel("Result of calculate").fill("42");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll("#pane-chat .end[data-finish]").length === 2);
  assert.equal(await page.getByLabel("Result of calculate").count(), 0, "it is sent");
  assert.match(await page.textContent("#pane-chat .call"), /Result42$/);
  const code = await page.locator(".listing code").first().textContent();
  assert.ok(code.includes('"role":"tool"') && code.includes('"content":"42"') && code.includes('"tool_choice":"none"'));
});

test("an answer follows a JSON schema", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  const schema = { type: "object", properties: { found: { type: "boolean" } }, required: ["found"], additionalProperties: false };
  await set(page, { json_schema: "{", max_tokens: 200, temperature: 0 });
  await page.click("#pane-prompt .primary");
  assert.match(await page.textContent('#pane-prompt [role="alert"]'), /json_schema must be JSON, such as/);
  await set(page, { json_schema: JSON.stringify(schema) });
  await page.click("#pane-prompt .primary");
  await ended(page, "prompt");
  const [shown] = await answers(page, "prompt");
  assert.equal(typeof JSON.parse(shown.slice((await page.inputValue("#prompt")).length)).found, "boolean");
});

test("two ways to decode stand side by side", async () => {
  const { page } = tab;
  await mode(page, "prompt");
  await set(page, { max_tokens: 12, ignore_eos: "true", temperature: 0 });
  await page.selectOption("#other", "Beams");
  await page.click("#pane-prompt .primary");
  await page.waitForFunction(() => document.querySelectorAll("#pane-prompt .end[data-finish]").length === 2);
  assert.deepEqual(await page.locator("#pane-prompt .output h3").allTextContents(), ["Greedy, as set", "Beams"]);
  const prompt = await page.inputValue("#prompt");
  const wanted = [];
  for (const way of [{ temperature: 0 }, { num_beams: 4 }]) wanted.push((await complete(URL_, { prompt, max_tokens: 12, ignore_eos: true, ...way })).choices[0].text);
  assert.deepEqual(await answers(page, "prompt"), wanted.map((text) => prompt + text));
  const [one, other] = await page.locator("#pane-prompt .output section").evaluateAll((all) => all.map((box) => box.getBoundingClientRect().toJSON()));
  assert.ok(one.top === other.top && one.right <= other.left);
  await page.selectOption("#other", "");
  await page.click("#pane-prompt .primary");
  await ended(page, "prompt");
  assert.equal((await answers(page, "prompt")).length, 1);
});

test("a link carries a request, and opening it sends nothing", async () => {
  const { page } = tab;
  await tab.context.grantPermissions(["clipboard-read", "clipboard-write"]);
  await page.fill("#message", "Of this page");
  await page.click("#copy-link");
  await page.waitForSelector('#copy-link:has-text("Copied")');
  const copied = JSON.parse(decodeURIComponent(new URL(await page.evaluate(() => navigator.clipboard.readText())).hash.slice("#request=".length)));
  assert.deepEqual(copied, { path: "/v1/chat/completions", body: { messages: [{ role: "user", content: "Of this page" }] } });
  const link = (path, body) =>
    page.evaluate(async ([to, what]) => (await import("/playground/link.js")).linkTo(to, what), [path, body]);
  const body = { model: "m", prompt: "It's <b>100%</b> & #1\n“é”", temperature: 0, stop: ["\n", "b"], logit_bias: { 17: -5 }, ignore_eos: true, num_beams: null };
  const url = await link("/v1/completions", body);
  assert.ok(url.startsWith(`${URL_}/#request=`) && !url.includes('"model"'));
  const opened = await open(browser, URL_);
  const asked = [];
  opened.page.on("request", (request) => request.method() === "POST" && asked.push(request.url()));
  await opened.page.goto(url);
  await opened.page.waitForFunction(() => document.querySelector("#prompt")?.value.startsWith("It's"));
  assert.equal(await opened.page.getAttribute("#tab-prompt", "aria-selected"), "true");
  assert.equal(await opened.page.inputValue("#prompt"), body.prompt);
  const code = await opened.page.locator(".listing code").nth(1).textContent();
  for (const part of ["temperature=0", 'stop=["\\n", "b"]', 'logit_bias={"17": -5}', '"ignore_eos": True']) assert.ok(code.includes(part), part + code);
  const chat = await link("/v1/chat/completions", { messages: [{ role: "system", content: "Be brief." }, { role: "user", content: "a" }, { role: "assistant", content: "b" }, { role: "user", content: "c" }] });
  await opened.page.goto(chat); // the page stays, and takes it up
  await opened.page.waitForFunction(() => document.querySelector("#message").value === "c");
  const talk = await opened.page.locator(".listing code").first().textContent();
  assert.ok(talk.includes('[{"role":"system","content":"Be brief."},{"role":"user","content":"a"},{"role":"assistant","content":"b"},{"role":"user","content":"c"}]'));
  const call = { id: "c1", type: "function", function: { name: "f", arguments: "{}" } };
  const turns = [{ role: "user", content: "a" }, { role: "assistant", content: "", tool_calls: [call] }, { role: "tool", tool_call_id: "c1", content: "d" }];
  await opened.page.goto(await link("/v1/chat/completions", { messages: turns }));
  await opened.page.waitForFunction(() => document.querySelector(".call textarea")?.value === "d");
  assert.ok((await opened.page.locator(".listing code").first().textContent()).includes(JSON.stringify(turns)));
  await opened.page.goto(await link("/v1/fill-mask", { input: "x" }));
  await opened.page.waitForFunction(() => /does not answer/.test(document.querySelector("#link-problem").textContent));
  await opened.page.goto(`${URL_}/#request=%7B`);
  await opened.context.close();
  assert.deepEqual(asked, []);
  assert.deepEqual(opened.complaints, []);
});

test("an image is embedded where the model reads images", { skip: !IMAGES_URL }, async () => {
  const images = await open(browser, IMAGES_URL);
  const { page } = images;
  await page.waitForSelector('[role="tab"]');
  await page.getByLabel("or an image, in its place").setInputFiles({ name: "a cat's.png", mimeType: "image/png", buffer: PICTURE });
  const curl = page.locator(".listing code").first();
  await page.waitForFunction(() => document.querySelector(".listing code").textContent.includes("base64 -w0"));
  await page.click("#pane-embeddings .primary");
  await page.waitForSelector("#pane-embeddings .vector");
  const caption = await page.textContent("#pane-embeddings figcaption");
  const answer = await (await fetch(`${IMAGES_URL}/v1/embeddings`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ input: { image: PICTURE.toString("base64") } }) })).json();
  assert.ok(caption.includes(`from ${answer.data[0].embedding.slice(0, 4).map((value) => value.toFixed(4)).join(", ")}`));
  const folder = await mkdtemp(join(tmpdir(), "octavo-"));
  await writeFile(join(folder, "a cat's.png"), PICTURE);
  const { stdout } = await promisify(execFile)("sh", ["-c", await curl.textContent()], { cwd: folder });
  assert.deepEqual(JSON.parse(stdout).data, answer.data);
  await images.context.close();
  assert.deepEqual(images.complaints, []);
  const { page: plain } = tab;
  await mode(plain, "embeddings");
  assert.equal(await plain.locator('#pane-embeddings input[type="file"]').count(), 0);
});

test("sound is transcribed where the model hears", { skip: !SPEECH_URL }, async () => {
  const speech = await open(browser, SPEECH_URL);
  const { page } = speech;
  await page.waitForSelector("#tab-speech");
  await page.click("#pane-speech .primary");
  assert.equal(await page.textContent('#pane-speech [role="alert"]'), "Choose a file first.");
  await page.getByLabel("A file").setInputFiles(process.env.OCTAVO_SOUND);
  await page.fill("#language", "en");
  await page.click("#pane-speech .primary");
  await page.waitForFunction(() => document.querySelector("#pane-speech .output").textContent);
  const curl = await page.locator(".listing code").first().textContent();
  assert.ok(curl.includes("-F 'file=@sound.wav' \\\n  -F 'language=en'"), curl);
  const { stdout } = await promisify(execFile)("sh", ["-c", curl], { cwd: dirname(process.env.OCTAVO_SOUND) });
  assert.equal(typeof JSON.parse(stdout).text, "string"); // of a model with random weights, which draws
  assert.match(await page.locator(".listing code").nth(1).textContent(), /audio\.transcriptions\.create\(model=.*file=open\("sound.wav", "rb"\), language="en"\)/);
  await speech.context.close();
  assert.deepEqual(speech.complaints, []);
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

test("tokens are found in the text that they make, marks have names, and requests labels", async () => {
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
  const names = await page.evaluate(async () => {
    const { markOf } = await import("/playground/words.js");
    return ["</s>", "<s>", "<|im_end|>", "<|tool_call|>", "[SEP]", "<b>", " a", "<|", "<pad>"].map(markOf);
  });
  assert.deepEqual(names, ["end of text", "start of text", "end of text", "tool call", "end of text", null, null, null, "pad"]);
  const label = await page.evaluate(async () => (await import("/playground/labels.js")).labelOf("123456789"));
  assert.equal(label, "cbf43926".slice(-5)); // the end of the standard's check value of CRC-32
});

test("nothing overflows on a small phone", async () => {
  const phone = await open(browser, URL_, { viewport: { width: 320, height: 640 }, hasTouch: true, isMobile: true, reducedMotion: "reduce" });
  const { page } = phone;
  await page.waitForSelector('[role="tab"]');
  await page.click("#settings-box > summary");
  assert.ok(await page.locator('#parameters [name="temperature"]').isVisible());
  await page.click("#machine-box > summary");
  await page.waitForSelector("#machine-view:not([hidden])");
  await page.click("#machine-view summary");
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(width <= 320, `${width} pixels wide`);
  await phone.context.close();
  assert.deepEqual(phone.complaints, []);
});

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
  await page.waitForSelector("#machine-view:not([hidden])", { state: "attached" });
  assert.equal(await page.evaluate(() => localStorage.length), 0);
  assert.deepEqual(await page.evaluate(() => Object.values(sessionStorage)), [KEY]);
  assert.deepEqual(await locked.context.cookies(), []);
  assert.ok((await page.textContent(".listing code")).includes("$OCTAVO_API_KEY"));
  assert.ok(!(await page.content()).includes(KEY));
  await locked.context.close();
  assert.deepEqual(locked.complaints.filter((text) => !/401/.test(text)), []);
});

test("a feed that is switched off is not asked for", { skip: !IMAGES_URL }, async () => {
  const silent = await open(browser, IMAGES_URL);
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
