"""Other engines in processes of their own, for `benchmarks/cpu.py`: what each one is asked, and what it answers."""
