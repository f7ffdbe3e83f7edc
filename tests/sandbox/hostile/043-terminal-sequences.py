# item 43: sequences that drive a terminal: title, clipboard, colours, overwriting, reversed text
# verdict: exited 0; has begin; has end
# control: output-below-the-limit.py
print("begin\x1b]0;title\x07\x1b]52;c;cm0gLXJm\x07\x1b[2J\x1b[1;31mred\x1b[0m\rgone\x08\x08\u202etxet\u2066\x9b2Jend")
