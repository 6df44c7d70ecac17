"""Speech to text with OpenAI's client: the text, English by beams, subtitles, and a stream of what is settled.

    octavo serve openai/whisper-small
    python examples/transcribe.py sound.wav

Another server's URL can be given as the second argument. The client comes with `pip install openai`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from openai import OpenAI

SOUND = Path(sys.argv[1])
URL = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{URL}/v1", api_key="unused")
MODEL = client.models.list().data[0].id

print("--- text")
print(client.audio.transcriptions.create(model=MODEL, file=SOUND).text)
print("--- in English, by 4 beams")
print(client.audio.translations.create(model=MODEL, file=SOUND, extra_body={"num_beams": 4}).text)
print("--- subtitles")
print(client.audio.transcriptions.create(model=MODEL, file=SOUND, response_format="srt"))
print("--- as it gets settled")
for event in client.audio.transcriptions.create(model=MODEL, file=SOUND, stream=True):
    if event.type == "transcript.text.delta":
        print(event.delta, end="", flush=True)
print()
