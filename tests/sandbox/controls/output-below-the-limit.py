# item 39: as much output as is kept; lacks a mark of what is left out
# verdict: exited 0; has xxx; lacks left out
import sys

sys.stdout.write("x" * (64 * 1024))
sys.stderr.write("y" * (64 * 1024))
