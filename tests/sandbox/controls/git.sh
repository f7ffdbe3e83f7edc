# item 59: a repository, commits, branches, merges, diffs
# verdict: exited 0; has merged; has 2 files changed
# limits: processes=64, memory_bytes=268435456; needs: git
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q -b main . || exit 1
echo one > one && git add one && git commit -q -m one
git checkout -q -b side && echo two > two && git add two && git commit -q -m two
git checkout -q main && echo more >> one && git commit -q -a -m more
git merge -q -m merged side && git log --format=%s -1
git diff --shortstat HEAD~2 HEAD
git diff --shortstat "$(git rev-list --max-parents=0 HEAD)" HEAD
git gc -q && git fsck > /dev/null
