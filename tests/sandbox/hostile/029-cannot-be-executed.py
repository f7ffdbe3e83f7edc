# item 29: executes what cannot be executed: no interpreter, no program, a directory, an empty file
# verdict: exited 0; has ENOENT ENOEXEC EACCES ENOEXEC
# control: scripts.sh
import errno
import os

with open("no-interpreter", "w") as file:
    file.write("#!/no/such/interpreter\n")
with open("text", "w") as file:
    file.write("this is no program\n")
with open("empty", "w") as file:
    pass
os.mkdir("directory")
found = []
for name in ["no-interpreter", "text", "directory", "empty"]:
    os.chmod(name, 0o755)
    try:
        os.execv("./" + name, [name])
    except OSError as error:
        found.append(errno.errorcode[error.errno])
print(*found)
