//! The names of Python's standard library.

/// The modules of Python 3.9 to 3.13 whose names an ordinary file could take, without those that begin with `_`.
const MODULES: &str = "\
abc aifc argparse array ast asynchat asyncio asyncore atexit audioop base64 bdb binascii bisect builtins bz2 cProfile \
calendar cgi cgitb chunk cmath cmd code codecs codeop collections colorsys compileall concurrent configparser contextlib \
contextvars copy copyreg crypt csv ctypes curses dataclasses datetime dbm decimal difflib dis distutils doctest email \
encodings ensurepip enum errno faulthandler fcntl filecmp fileinput fnmatch fractions ftplib functools gc \
genericpath getopt getpass gettext glob graphlib grp gzip hashlib heapq hmac html http imaplib imghdr imp importlib inspect io \
ipaddress itertools json keyword lib2to3 linecache locale logging lzma mailbox mailcap marshal math mimetypes mmap \
modulefinder multiprocessing netrc nis nntplib ntpath nturl2path numbers opcode operator optparse os pathlib pdb pickle \
pickletools pipes pkgutil platform plistlib poplib posix posixpath pprint profile pstats pty pwd py_compile pyclbr pydoc \
pyexpat queue quopri random re readline reprlib resource rlcompleter runpy sched secrets select selectors shelve shlex shutil \
signal site smtpd smtplib sndhdr socket socketserver spwd sqlite3 sre_compile sre_constants sre_parse ssl stat statistics \
string stringprep struct subprocess sunau symtable sys sysconfig syslog tabnanny tarfile telnetlib tempfile termios \
textwrap threading time timeit tkinter token tokenize tomllib trace traceback tracemalloc tty turtle types typing unicodedata \
unittest urllib uu uuid venv warnings wave weakref webbrowser wsgiref xdrlib xml xmlrpc zipapp zipfile zipimport zlib zoneinfo \
pytest pluggy _pytest py pkg_resources setuptools";

/// The module of the standard library, or of the usual test tools, that a file at `path` would be found before.
pub fn shadowed(path: &str) -> Option<&'static str> {
    let top = path.split('/').next().unwrap_or(path);
    let name = if top.len() == path.len() { top.strip_suffix(".py")? } else { top };
    MODULES.split_ascii_whitespace().find(|module| *module == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_at_the_top_shadow() {
        assert_eq!(shadowed("json.py"), Some("json"));
        assert_eq!(shadowed("random/deep/x.py"), Some("random"));
        for path in ["pkg/json.py", "json.txt", "jason.py", "README"] {
            assert_eq!(shadowed(path), None, "{path}");
        }
    }
}
