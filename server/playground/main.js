// Puts the page together: what the server serves decides what it shows.

import { ApiError, askJson, getKey, needsKey } from "./api.js";
import { BeamTree } from "./beams.js";
import { hideCard } from "./card.js";
import { ChatPane } from "./chat_pane.js";
import { Code } from "./code.js";
import { byId, h } from "./dom.js";
import { setUpKey } from "./key.js";
import { conversationLink, linkedConversation, linkedRequest } from "./link.js";
import { Machine } from "./machine.js";
import { chooseModel, picker } from "./models.js";
import { Modes } from "./modes.js";
import { NumbersPane, numberPaths } from "./numbers_pane.js";
import { Parameters } from "./parameters.js";
import { PromptPane } from "./prompt_pane.js";
import { loadSchemas } from "./schema.js";
import { SpeechPane } from "./speech_pane.js";
import { Store } from "./store.js";

const ALTERNATIVES = 5; // of each token
const LENGTH = 120; // tokens of an answer to a prompt, where the server's own default is a line

const context = {
  beams: new BeamTree(byId("beams"), byId("beam-tree")),
  changed: () => showCode(),
  mine: (id) => machine.mine(id),
  // The conversation that is open stands in the address, so that a reload finds it.
  place: (id) => history.replaceState(null, "", id ? conversationLink(id) : location.pathname + location.search),
  // What the page asks for to show more than the text; the listings leave it out.
  extras: (path) => ({
    ...(path.includes("chat") ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES }),
    stream_beams: true,
  }),
};
const machine = new Machine();
const code = new Code(byId("code"), byId("code-title"), byId("copy-link"));
const parameters = (context.parameters = new Parameters(byId("parameters"), byId("presets"), () => {
  modes.current?.remember?.();
  showCode();
}));
const modes = new Modes((pane) => {
  document.body.dataset.mode = pane.name;
  if (pane.composer) pane.composer.element.before(byId("beams"));
  else byId("panes").after(byId("beams"));
  byId("settings").hidden = !pane.schema;
  if (pane.schema) {
    const usual = pane.schema === "chat" ? { max_tokens: "what fits" } : {};
    parameters.show(context.schemas[pane.schema], { ...usual, ...context.model.decoding });
    const room = Math.min(LENGTH, Math.floor(context.model.max_model_len / 2));
    parameters.suggest("max_tokens", pane.schema === "completion" ? room : undefined);
  }
  showCode();
});

function showCode() {
  const pane = modes.current;
  if (pane) code.show(pane.path, pane.session.sent, () => pane.body(), Boolean(pane.schema));
}

// A link's request, in the forms that it is made with, or a conversation. Nothing is sent.
function openLink() {
  const conversation = context.store?.all.get(linkedConversation());
  if (conversation) return modes.panes?.find((pane) => pane.name === "chat")?.open(conversation);
  const request = linkedRequest();
  if (!request || !modes.panes) return;
  const pane = modes.panes.find((one) => one.path === request.path && one.fill);
  const problem = `The link holds a request to ${request.path}, which this model does not answer.`;
  byId("link-problem").textContent = pane ? "" : problem;
  if (!pane) return;
  pane.session.sent = null;
  modes.choose(pane);
  if (pane.schema) parameters.setAll(request.body);
  pane.fill(request.body);
  showCode();
}

function makePanes(endpoints) {
  const panes = [];
  if (endpoints.includes("/v1/chat/completions")) panes.push(new ChatPane(context));
  if (endpoints.includes("/v1/completions")) panes.push(new PromptPane(context));
  if (endpoints.includes("/v1/audio/transcriptions")) panes.push(new SpeechPane(context));
  for (const path of numberPaths) if (endpoints.includes(path)) panes.push(new NumbersPane(context, path));
  return panes;
}

// Something to begin with; the bundled encoder-decoder translates from a language of its own.
function examplePrompt(model) {
  if (!context.isSeq2seq) return "Once upon a time";
  if (model.id.startsWith("octavo-demo")) return "luma li ursu pika en silva lantan trovet.";
  return "translate English to German: The house is small.";
}

function describeModel(models, model) {
  const kind = context.isSeq2seq ? "encoder-decoder" : model.tasks.includes("generate") ? "decoder" : "encoder";
  byId("model").replaceChildren(picker(models, model), ` ${kind}, up to ${model.max_model_len.toLocaleString("en")} tokens`);
}

async function connect() {
  if (document.body.dataset.key === "needed" && !getKey()) return document.dispatchEvent(needsKey());
  try {
    const [models, schemas] = await Promise.all([askJson("v1/models"), loadSchemas()]);
    const model = await chooseModel(models.data);
    if (!model.inputs) {
      const why = model.reason ? `: ${model.reason}` : "; reload the page to try again";
      byId("model").replaceChildren(picker(models.data, model), ` is ${model.state}${why}`);
      return;
    }
    if (!context.store) await (context.store = new Store()).open();
    Object.assign(context, { model, schemas, isSeq2seq: model.max_encoder_len != null });
    context.examples = { chat: "What is a KV cache?", prompt: examplePrompt(model) };
    describeModel(models.data, model);
    const panes = makePanes(model.endpoints);
    modes.show(panes);
    openLink();
    if (!panes.length) {
      const words = "This model answers none of the questions that this page can ask; see the API's documentation.";
      byId("panes").append(h("p", { class: "notice" }, words));
    }
    machine.watch();
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 401)) {
      byId("model").textContent = error instanceof ApiError ? error.message : "The server cannot be reached; trying again …";
      if (error.status !== 403) setTimeout(connect, 2000); // a key of another role has to be replaced
    }
  }
}

addEventListener("hashchange", openLink);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  hideCard();
  modes.current?.session.stop();
});
setUpKey(connect);
connect();
