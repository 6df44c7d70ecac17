// How the page asks the server that it came from: the key, and errors in words.

const KEY = "octavo-api-key";

// The page may be shown under a prefix: everything is asked for beside it.
export const address = (path) => new URL(path.replace(/^\//, ""), new URL(".", document.baseURI));

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class ApiError extends Error {
  constructor(status, error = {}, retryAfter = null) {
    super(error.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error.code ?? null;
    this.param = error.param ?? null;
    this.retryAfter = retryAfter;
  }
}

// What tells the page that it has no key, or a wrong one.
export const needsKey = (error) => new CustomEvent("octavo:key", { detail: error });

// The response, if it is a good one.
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  const isForm = body instanceof FormData;
  if (body !== undefined && !isForm) headers["Content-Type"] = "application/json";
  const response = await fetch(address(path), {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined || isForm ? body : JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
    referrerPolicy: "no-referrer",
  });
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  const error = new ApiError(response.status, problem.error, response.headers.get("Retry-After"));
  if (error.status === 401) document.dispatchEvent(needsKey(error));
  throw error;
}

export const askJson = async (path, options) => (await ask(path, options)).json();
