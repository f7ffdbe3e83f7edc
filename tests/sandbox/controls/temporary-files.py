# item 10: files, directories and temporary files below every limit
# verdict: exited 0; has kept
import os
import tempfile

with tempfile.TemporaryDirectory() as directory, tempfile.NamedTemporaryFile() as file:
    file.write(b"x" * (1 << 20))
    for number in range(100):
        path = os.path.join(directory, str(number))
        with open(path, "w") as small:
            small.write(str(number))
    assert len(os.listdir(directory)) == 100
os.makedirs("a/b/c")
os.rename("a/b", "d")
with open("d/c/file", "w") as file:
    file.write("kept")
os.chmod("d/c/file", 0o400)
print(open("d/c/file").read())
