# item 39: output without end at full speed
# verdict: output_limit; truncated; has bytes left out
# control: output-below-the-limit.py
exec yes
