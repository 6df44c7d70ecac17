// The chat as a page that one keeps open. Answers are scripted, so that nothing waits for a model.

import assert from "node:assert/strict";
import { after, afterEach, before, test } from "node:test";
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
const distance = (page) => area(page).evaluate((log) => log.scrollHeight - log.clientHeight - log.scrollTop);

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
      assert.ok((await distance(page)) <= 1, "the answer is followed");
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
  assert.ok((await distance(page)) <= 1);
  await say(page, LONG);
  await end(page);
  assert.ok((await distance(page)) <= 1);
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
