# item 48: reads to the end of an empty input, and input from a file
# verdict: exited 0; has read 3 lines
cat
printf 'a\nb\nc\n' > lines
echo "read $(wc -l < lines) lines"
