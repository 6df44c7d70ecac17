// A headless Chromium with one page, and all that the page complains of.

import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const PLACES = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];

export async function launch() {
  const executablePath = process.env.CHROMIUM ?? PLACES.find(existsSync);
  // Containers run as root, for which Chromium has no sandbox.
  return chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-dev-shm-usage"] });
}

export async function open(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(60000); // a machine may be busy
  const complaints = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(url).origin) complaints.push(`outside: ${request.url()}`);
  });
  await page.goto(`${url}/`);
  return { page, context, complaints };
}

// Settings by name; what is folded away is unfolded first.
export async function set(page, values) {
  for (const [name, value] of Object.entries(values)) {
    const field = page.locator(`#parameters [name="${name}"]`);
    await page.evaluate((at) => {
      let box = document.querySelector(`#parameters [name="${at}"]`).closest("details");
      for (; box; box = box.parentElement.closest("details")) box.open = true;
    }, name);
    if ((await field.evaluate((element) => element.tagName)) === "SELECT") await field.selectOption(String(value));
    else await field.fill(String(value));
  }
}

// A request beside the page's own, so that there is something to see.
export async function complete(url, body) {
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// From here on a chat's answers are what the test says: `say(page, delta)` sends a piece, `end(page)` completes the answer.
// `page.evaluate(() => window.asked)` has the requests' bodies.
export const script = (page) =>
  page.evaluate(() => {
    const real = window.fetch;
    window.asked = [];
    window.fetch = (url, options) => {
      if (!String(url).endsWith("/v1/chat/completions")) return real(url, options);
      window.asked.push(JSON.parse(options.body));
      const encoder = new TextEncoder();
      const body = new ReadableStream({
        start(controller) {
          const send = (data) => controller.enqueue(encoder.encode(`data: ${data}\n\n`));
          window.say = (delta, finish_reason = null, logprobs = null) =>
            send(JSON.stringify({ id: "chat-1", choices: [{ index: 0, delta, finish_reason, logprobs }] }));
          window.close = () => (send("[DONE]"), controller.close());
          options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
        },
      });
      return Promise.resolve(new Response(body));
    };
  });

export const say = (page, delta) => page.evaluate((news) => window.say(news), typeof delta === "string" ? { content: delta } : delta);

export async function end(page, finish = "stop") {
  await page.evaluate((why) => (window.say({}, why), window.close()), finish);
  await page.waitForFunction(() => !document.querySelector('[aria-busy="true"]'));
}
