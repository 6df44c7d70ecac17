// A colour for each request, which it keeps: those that are there together differ as long as there are enough colours.

const COUNT = 12;

export class Colours {
  constructor() {
    this.places = new Map(); // request -> number of its colour, longest unseen first
  }

  see(requests) {
    const now = new Set(requests);
    for (const request of now) {
      const place = this.places.get(request) ?? this.freePlace(now);
      this.places.delete(request);
      this.places.set(request, place);
    }
    for (const request of this.places.keys()) {
      if (this.places.size <= 4 * COUNT) break;
      if (!now.has(request)) this.places.delete(request);
    }
  }

  freePlace(now) {
    const taken = new Set([...this.places].filter(([request]) => now.has(request)).map(([, place]) => place));
    const unseen = [...this.places].filter(([request]) => !now.has(request)).map(([, place]) => place);
    const fresh = [...Array(COUNT).keys()].filter((place) => !taken.has(place) && !unseen.includes(place));
    return fresh[0] ?? unseen.find((place) => !taken.has(place)) ?? this.places.size % COUNT;
  }

  of(request) {
    return this.places.get(request) ?? 0;
  }

  // The colours themselves are the style sheet's, which knows light and dark.
  static read() {
    const style = getComputedStyle(document.documentElement);
    return Array.from({ length: COUNT }, (_, place) => style.getPropertyValue(`--request-${place}`).trim());
  }
}
