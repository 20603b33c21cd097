"""What runs beside `train.py`: who may sample when, what is kept and written, who waits, and what stands still."""
