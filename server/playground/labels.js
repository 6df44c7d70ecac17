// The short label under which the feed shows a request: the last 20 bits of the CRC-32 of the engine's id for it.

export function labelOf(id) {
  let crc = ~0;
  for (const byte of new TextEncoder().encode(id)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return (~crc & 0xfffff).toString(16).padStart(5, "0");
}
