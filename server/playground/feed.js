// The live feed: what the engine holds, a few times a second, as long as somebody looks.

import { ApiError, ask } from "./api.js";
import { events } from "./sse.js";

const RETRY = 2000; // milliseconds

export class Feed {
  constructor(onFrame, onState) {
    Object.assign(this, { onFrame, onState, abort: null, wanted: false });
    // A page in the background is not seen: the engine is not asked for it.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.wanted && this.open()));
  }

  open() {
    this.wanted = true;
    if (this.abort || document.hidden) return;
    this.abort = new AbortController();
    this.read(this.abort.signal);
  }

  close() {
    this.abort?.abort();
    this.abort = null;
  }

  async read(signal) {
    let wait = RETRY;
    try {
      const response = await ask("playground/live", { signal });
      for await (const data of events(response)) {
        const frame = JSON.parse(data);
        if (frame.error) throw new ApiError(200, frame.error);
        this.onFrame(frame);
      }
    } catch (error) {
      if (signal.aborted) return;
      const refused = error instanceof ApiError && [401, 403, 404].includes(error.status);
      this.onState(error instanceof ApiError ? error.message : "The server cannot be reached; trying again …");
      if (refused) wait = null;
    }
    if (signal.aborted) return;
    this.abort = null;
    if (wait !== null) setTimeout(() => this.open(), wait);
  }
}
