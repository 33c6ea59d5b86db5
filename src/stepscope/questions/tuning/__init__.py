"""Which choices make this step the fastest that fits and stays right?"""
