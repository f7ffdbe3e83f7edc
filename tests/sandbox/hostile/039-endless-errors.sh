# item 39: errors without end at full speed
# verdict: output_limit; truncated
# control: output-below-the-limit.py
exec yes >&2
