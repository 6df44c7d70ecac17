// Pictures of the playground for README: node screenshots.mjs FOLDER URL SEQ2SEQ_URL, with the two demo models behind them.

import { mkdirSync } from "node:fs";
import { complete, launch, open, set } from "./browser.mjs";

const [folder, url, seq2seq] = process.argv.slice(2);
const STORY = "Once upon a time there was a captain who kept a small green stone in a wooden box by the window.";
mkdirSync(folder, { recursive: true });
const browser = await launch();

// Other clients' requests: some with a beginning in common, some with several answers.
let on = true;
async function visit(number) {
  while (on) {
    const body = { max_tokens: 120 + 60 * (number % 4), ignore_eos: true, temperature: 1, seed: number };
    const prompt = number % 3 ? `${STORY} ${"And then".repeat(number % 2)}` : "Tell me about the river and the sea";
    await complete(url, { prompt, ...body, n: number % 4 === 0 ? 3 : 1 }).catch(() => {});
  }
}

async function ready(page) {
  await page.waitForSelector("#machine-view:not([hidden])", { state: "attached" });
  await page.waitForSelector('[role="tab"]');
}

// Later visitors have found what earlier ones left.
const busy = (page) =>
  page.waitForFunction(() => {
    const { held, cached } = document.querySelector("#machine").dataset;
    const found = /\d used again/.test(document.querySelector("#requests").textContent);
    return Number(held) > 70 && Number(cached) > 120 && found && document.querySelectorAll("#requests .swatch").length > 4;
  });

async function picture(page, name) {
  await page.screenshot({ path: `${folder}/playground-${name}.png` });
}

async function ask(page) {
  await page.click("#tab-chat");
  await page.click('.presets button:has-text("Sampling")');
  await set(page, { seed: 3 });
  await page.evaluate(() => (document.querySelector("#settings-box").open = false));
  await page.fill("#message", "What is a KV cache?");
  await page.press("#message", "Enter");
  await page.waitForSelector("#pane-chat .end[data-finish]", { state: "attached" });
}

for (const colorScheme of ["light", "dark"]) {
  const { page, context } = await open(browser, url, { viewport: { width: 1300, height: 740 }, colorScheme });
  await ready(page);
  await ask(page);
  await page.click(".toggle");
  await page.click("#machine-box > summary");
  await page.click("#machine-view summary");
  on = true;
  const visitors = [...Array(9).keys()].map(visit);
  await busy(page);
  await page.evaluate(() => document.querySelector("#gauges").scrollIntoView());
  await page.locator("#pane-chat .token").first().hover();
  await picture(page, colorScheme);
  on = false;
  await Promise.all(visitors);
  await context.close();
}

{
  const { page, context } = await open(browser, seq2seq, { viewport: { width: 1000, height: 720 } });
  await ready(page);
  await page.click('.presets button:has-text("Beams")');
  await page.click("#pane-prompt .primary");
  await page.waitForSelector("#pane-prompt .end[data-finish]");
  await page.waitForSelector("#beams .best");
  await picture(page, "beams");
  await context.close();
}

{
  const phone = { viewport: { width: 375, height: 760 }, deviceScaleFactor: 2, isMobile: true, hasTouch: true, colorScheme: "dark" };
  const { page, context } = await open(browser, url, phone);
  await ready(page);
  await ask(page);
  await page.evaluate(() => scrollTo(0, 0));
  await picture(page, "phone");
  await context.close();
}
await browser.close();
