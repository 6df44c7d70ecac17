"""Reading LoRA adapters: PEFT's folders and llama.cpp's GGUF files."""
