r"""The bash program that takes the future out of a git repository in a sandbox: all that HEAD does not lead to.

It prints one fact a line, `name value`; a line `fail WORDS` says why the repository cannot be used. Kept are HEAD, the
branch that it is on, tags that are merged into it, the work tree and, where it is HEAD's, the index. Of the folder .git
only what is named in `KEPT` stays, so no record that git has or will have can be forgotten here. The work tree is never
written to. Run again, it changes nothing.
"""

import shlex

KEPT = ("HEAD", "config", "index", "sharedindex.*", "objects", "info", "shallow", "modules", "description")
"""What stays in a folder .git; refs are written anew."""
KEPT_INFO = ("exclude", "attributes", "sparse-checkout")
SECTIONS = "remote|branch|url|http|credential|include|includeif|svn-remote|gui"
"""Parts of a repository's configuration that lead elsewhere."""
KEYS = (
    "core.hookspath",
    "core.fsmonitor",
    "core.sshcommand",
    "core.gitproxy",
    "core.usereplacerefs",
    "extensions.partialclone",
)

SAFE_GIT = r"""
for _name in $(compgen -e | grep ^GIT_); do unset "$_name"; done
home=$(mktemp -d /tmp/.sao-gym-XXXXXX) || exit 4
trap 'rm -rf -- "$home"' EXIT
printf '[safe]\n\tdirectory = *\n' >"$home/.gitconfig" || exit 4
export HOME=$home XDG_CONFIG_HOME=$home GIT_CONFIG_GLOBAL=$home/.gitconfig GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1
export GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0 LC_ALL=C
git() { command git -c core.useReplaceRefs=false -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
shopt -s nullglob dotglob extglob
set -o pipefail
"""
"""Makes git in a script deaf to everything outside of the repository; `$home` is a folder that goes with the script."""

_PURGE = r"""
fact() { printf '%s %s\n' "$1" "${*:2}"; }
fail() { fact fail "$*"; exit 3; }
words() { tr '\n' ' ' <"$home/said" | tail -c 200; }
G() { git --git-dir="$dir" "$@"; }

# keep FOLDER NAMES: remove from a folder all but what is named (patterns)
keep() {
  local folder=$1 entry name one
  shift
  for entry in "$folder"/*; do
    name=${entry##*/}
    for one in "$@"; do [[ $name == $one ]] && continue 2; done
    rm -rf -- "$entry"
  done
}

# count: sets reachable and stored, the numbers of objects that HEAD and the tags lead to, and that there are
count() {
  reachable=$(G rev-list --objects --all HEAD 2>"$home/said" | wc -l) || fail "its history is not whole: $(words)"
  stored=$(G cat-file --batch-all-objects --unordered --batch-check='%(objectname)' 2>"$home/said" | wc -l) ||
    fail "its objects cannot be listed: $(words)"
}

# plain: take away what makes git see another repository than its objects are
plain() {
  local section key
  while read -r section; do G config --file "$dir/config" --remove-section "$section"; done < <(
    G config --file "$dir/config" --name-only --get-regexp '^(@SECTIONS@)\.' 2>/dev/null | sed 's/\.[^.]*$//' | sort -u)
  for key in @KEYS@; do G config --file "$dir/config" --unset-all "$key"; done
  rm -rf -- "$dir/refs/replace" "$dir/info/grafts" "$dir"/objects/info/commit-graph*
  if [[ -f $dir/packed-refs ]]; then
    awk '$2 ~ /^refs\/replace\// {gone = 1; next} /^\^/ && gone {next} {gone = 0; print}' "$dir/packed-refs" >"$home/packed" &&
      cat "$home/packed" >"$dir/packed-refs" || fail "the disk is full"
  fi
}

# relate BASE: fails unless HEAD is the base commit, or one commit above it (the images' set-up)
relate() {
  local base above
  base=$(git rev-parse --verify -q "$1^{commit}") || fail "it has no commit $1"
  git merge-base --is-ancestor "$base" HEAD && above=$(git rev-list --count "$base..HEAD") && (( above <= 1 )) ||
    fail "HEAD ($(git rev-parse HEAD)) is neither $1 nor one commit above it"
  fact base "$base"
}

# purge WORK [BASE]: the repository whose work tree WORK is, wherever its records are
purge() {
  local work=$1 dir head branch pack alternates=0
  cd -- "$work" || fail "$work is not there"
  dir=$(git rev-parse --absolute-git-dir 2>"$home/said") || fail "git does not know it: $(words)"
  [[ ! -e $dir/reftable ]] || fail "its refs are kept in a form (reftable) that is not known here"
  plain
  [[ -z ${2-} ]] || relate "$2"
  head=$(G rev-parse --verify -q 'HEAD^{commit}') || fail "HEAD names no commit"
  branch=$(G symbolic-ref -q HEAD)
  visited+=("$dir")

  G for-each-ref --merged="$head" --format='%(objectname) %(refname)' refs/tags >"$home/refs" 2>"$home/said" ||
    fail "its tags cannot be read: $(words)"
  tags=$(wc -l <"$home/refs")
  [[ $branch == refs/heads/* ]] && printf '%s %s\n' "$head" "$branch" >>"$home/refs"
  [[ -s $dir/objects/info/alternates ]] && alternates=1
  keep "$dir" @KEPT@
  keep "$dir/info" @KEPT_INFO@
  mkdir -p "$dir/refs/heads" "$dir/refs/tags" && sort -k2 "$home/refs" >"$dir/packed-refs" || fail "the disk is full"

  keep "$dir/objects" '[0-9a-f][0-9a-f]' pack info
  keep "$dir/objects/info" alternates
  keep "$dir/objects/pack" 'pack-*.pack' 'pack-*.idx' 'pack-*.rev'
  for pack in "$dir"/objects/pack/*; do
    [[ -e ${pack%.*}.pack && -e ${pack%.*}.idx ]] || rm -f -- "$pack"
  done

  G diff-index --cached --quiet "$head" -- 2>/dev/null || GIT_WORK_TREE=$PWD G reset -q 2>"$home/said" ||
    fail "its index cannot be set to HEAD: $(words)"
  count
  removed=0
  if (( stored != reachable || alternates )); then
    local before=$stored
    G -c repack.writeBitmaps=false -c pack.writeBitmaps=false repack -a -d -n -q --window=0 2>"$home/said" ||
      fail "its objects cannot be packed: $(words)"
    rm -f -- "$dir/objects/info/alternates"
    G prune --expire=now 2>"$home/said" || fail "its objects cannot be pruned: $(words)"
    keep "$dir/objects/pack" 'pack-*.pack' 'pack-*.idx' 'pack-*.rev'
    keep "$dir/objects/info"
    count
    (( stored == reachable )) || fail "$(( stored - reachable )) objects that HEAD does not lead to cannot be removed"
    removed=$(( before - stored ))
  fi
  rm -f -- "$dir/objects/info/alternates"
}

main() {
  local place modules visited=()
  type -P git >/dev/null || fail "there is no git in it"
  cd -- "$1" 2>/dev/null || fail "it has no folder $1"
  [[ -d .git && ! -L .git && ! -e .git/commondir ]] || fail "$1 is no git repository of its own"
  purge "$PWD" "$2"
  fact head "$(git rev-parse HEAD)"
  fact objects "$stored"
  fact removed "$removed"
  fact tags "$tags"
  while IFS= read -r -d '' place; do
    if ( purge "${place%/.git}" >/dev/null 2>&1 ); then
      visited+=("$(git -C "${place%/.git}" rev-parse --absolute-git-dir)")
    else
      fact left "${place%/.git}"
    fi
  done < <(find "$PWD" -mindepth 2 -name .git -prune -print0)
  [[ -d .git/modules ]] && while IFS= read -r -d '' place; do
    place=${place%/HEAD}
    [[ -d $place/objects && " ${visited[*]} " != *" $place "* ]] && rm -rf -- "$place"
  done < <(find "$PWD/.git/modules" -name HEAD -type f -print0)
  fact done 1
}
"""


def purge_command(workdir: str, base_commit: str) -> str:
    """The whole program for the repository at `workdir`."""
    program = _PURGE.replace("@SECTIONS@", SECTIONS)
    for name, words in (("@KEPT@", KEPT), ("@KEPT_INFO@", KEPT_INFO), ("@KEYS@", KEYS)):
        program = program.replace(name, shlex.join(words))
    return f"{SAFE_GIT}\n{program}\nmain {shlex.quote(workdir)} {shlex.quote(base_commit)}\n"
