// Several models behind one address: which one the page talks with. The choice lasts as long as the tab.

import { ask, askJson } from "./api.js";
import { byId, h } from "./dom.js";

const CHOICE = "octavo-model";

const named = (model) => (model.state === "loaded" ? model.id : `${model.id} (${model.state})`);

// The chosen one of all models. One that is not loaded is loaded, because only then all of it is known.
export async function chooseModel(models) {
  const model = models.find((one) => one.id === sessionStorage.getItem(CHOICE)) ?? models[0];
  if (model.inputs) return model;
  byId("model").replaceChildren(picker(models, model), " is loading …");
  await ask("tokenize", { body: { model: model.id, prompt: "a" } }).catch(() => null); // the answer does not matter
  return askJson(`v1/models/${model.id}`);
}

// What stands for the model's name: the name, or a choice where there are several.
export function picker(models, model) {
  if (model.state === undefined) return h("b", {}, model.id);
  const known = models.map((one) => (one.id === model.id ? model : one));
  const options = known.map((one) => h("option", { value: one.id, selected: one === model }, named(one)));
  const choose = (event) => {
    sessionStorage.setItem(CHOICE, event.target.value);
    location.reload();
  };
  const select = h("select", { "aria-label": "Model", onchange: choose, onfocus: () => refresh(select) }, options);
  return select;
}

async function refresh(select) {
  const { data } = await askJson("v1/models").catch(() => ({ data: [] }));
  for (const option of select.options) {
    const model = data.find((one) => one.id === option.value);
    if (model) option.textContent = named(model);
  }
}
