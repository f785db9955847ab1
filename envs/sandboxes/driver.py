r"""The bash program inside a sandbox that runs commands for the host: no other interpreter is needed there.

Requests come on stdin, each ended by NUL and begun by a key that only the host knows; what is neither is passed over.
A command runs below a supervisor, a fork of the driver, which waits for it and then writes a mark on every stream: NUL,
a number used once, and the exit code. The driver itself goes on reading, so that it can answer while a command hangs.

The driver runs from a copy of bash that nobody may read. To the kernel such a process is not to be looked into: commands
of the same user reach neither its memory nor its descriptors, so no command can learn a mark before it is written.

To kill a command is to kill all that was born since it began, less the children of what was there before: a daemon that
set a session of its own is found, a server that an earlier command left in the background stays. All victims are
stopped before any is killed, so none can fork on. All of this holds where the driver is process 1 of a namespace, as every
backend must start it; elsewhere only descendants are ended, and no process that is somebody else's.
"""

import shlex
from collections.abc import Sequence

STATE = "/tmp/.sao-gym"
"""Folder inside for what is handed in."""

_START = r"""
shopt -s execfail
umask 022
mkdir -p -m 700 "$2" && cp "$BASH" "$2/shell" && chmod 0111 "$2/shell" && printf '%s' "$1" >"$2/driver" &&
  exec -a bash "$2/shell" -p "$2/driver" "$2"
_sg_program=$1
shift
eval "$_sg_program"
"""

_DRIVER = r"""
set -m
_sg_dir=$1
_sg_signals="HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM SYS TSTP TTIN TTOU"
trap '' $_sg_signals
exec 7>&2 2>/dev/null
exec 8<> <(:)
rm -f "$_sg_dir/shell" "$_sg_dir/driver"
hash bash head cat mkdir
@SETUP@
_sg_bash=${BASH_CMDS[bash]:-bash}
_sg_p=0 _sg_s=0 _sg_v=() _sg_most=@MOST@

# mark NUMBER PAYLOAD: on every stream, each in one write
_sg_mark() {
  printf '\0%s:%s\n' "$1" "$2"
  printf '\0%s:\n' "$1" >&7
  @DATA@
}

# crowd: end all that runs inside when hardly another process can be started; who runs a command could not go on
_sg_crowd() {
  local all=(/proc/[0-9]*)
  if (( _sg_most && $$ == 1 && ${#all[@]} * 10 > _sg_most * 9 )); then
    kill -KILL -1
    read -r -t 0.2 -u 8
    printf '[everything in the background was ended: almost %s processes]\n' "$_sg_most" >&7
  fi
}

# run NUMBER FOLDER EXPORTS INPUT SINK KIND COMMAND
_sg_run() {
  _sg_crowd
  (
    set -m
    printf 1000 >/proc/self/oom_score_adj # when memory runs out, the command goes and the driver stays
    trap - $_sg_signals
    LC_ALL=
    unset LC_ALL
    if ! cd -- "$2" 2>/dev/null; then
      printf 'the folder %s is not there\n' "$2" >&7
      _sg_mark "$1" 126
      exit
    fi
    _sg_number=$1 _sg_input=$4 _sg_sink=$5 _sg_kind=$6 _sg_command=$7
    eval "$3"
    [[ $_sg_kind == stored ]] && { IFS= read -r -d '' _sg_command <"$_sg_command"; }
    case $_sg_kind in
    file) "$_sg_bash" -- "$_sg_command" <"$_sg_input" >&"$_sg_sink" 2>&7 7>&- 8>&- @CLOSE@ ;;
    *) "$_sg_bash" -c "$_sg_command" <"$_sg_input" >&"$_sg_sink" 2>&7 7>&- 8>&- @CLOSE@ ;;
    esac
    _sg_code=$?
    [[ $_sg_input == /dev/null ]] || : >"$_sg_input"
    _sg_mark "$_sg_number" $_sg_code
  ) </dev/null &
  _sg_p=$!
  disown -a # else bash remembers every one for ever
  _sg_stat $_sg_p && _sg_s=$_sg_start
}

# put NUMBER FILE BYTES HOW: bytes that follow the request become (or extend) a file
_sg_put() {
  [[ -d $_sg_dir ]] || mkdir -p -m 700 "$_sg_dir"
  [[ $4 == new ]] && { : >"$2"; }
  # The second cat takes what a full disk did not, so that no byte is left to be read as a request.
  head -c "$3" | { cat >>"$2" || { cat >/dev/null; false; }; }
  _sg_mark "$1" $?
}

# look NUMBER: is the supervisor still there?
_sg_look() {
  if kill -0 $_sg_p; then _sg_mark "$1" busy; else _sg_mark "$1" idle; fi
}

# stat PID: sets state, parent and start (ticks)
_sg_stat() {
  local text= IFS=' '
  { IFS= read -r -d '' text <"/proc/$1/stat"; } 2>/dev/null
  [[ $text ]] || return 1
  text=${text##*) }
  set -- $text
  _sg_state=$1 _sg_parent=$2 _sg_start=${20}
}

_sg_is_older() {
  (( start[$1] < _sg_s || (start[$1] == _sg_s && $1 < _sg_p) ))
}

# victims: who was born since the command began and not below an older one; counts those not stopped yet
_sg_victims() {
  local p q
  local -A start parent state
  _sg_v=() _sg_moving=0
  for p in /proc/[0-9]*; do
    p=${p#/proc/}
    _sg_stat "$p" || continue
    start[$p]=$_sg_start parent[$p]=$_sg_parent state[$p]=$_sg_state
  done
  for p in "${!start[@]}"; do
    [[ $p == $$ || $p == 1 || ${state[$p]} == [ZX] ]] && continue
    q=$p
    while :; do
      _sg_is_older $q && continue 2
      [[ $q == "$_sg_p" ]] && break
      q=${parent[$q]:-1}
      if [[ $q == $$ || $q == 1 || $q == 0 || -z ${start[$q]} ]]; then
        (( $$ == 1 )) && break
        continue 2
      fi
    done
    _sg_v+=("$p")
    [[ ${state[$p]} == [Tt] ]] || (( _sg_moving++ ))
  done
}

# end NUMBER: end the command; says killed, or all when everything inside had to go
_sg_end() {
  local pass
  for (( pass = 0; pass < 60; pass++ )); do
    (( pass > 3 )) && read -r -t 0.02 -u 8
    _sg_victims
    if (( ${#_sg_v[@]} == 0 )); then
      _sg_mark "$1" killed
      return
    fi
    if (( _sg_moving && pass % 10 < 8 )); then
      kill -STOP "${_sg_v[@]}"
    else
      kill -KILL "${_sg_v[@]}"
    fi
  done
  (( $$ == 1 )) && kill -KILL -1
  _sg_mark "$1" all
}

LC_ALL=C
IFS= read -r -d '' _sg_key || exit
{
while IFS= read -r -d '' _sg_request; do
  [[ $_sg_request == "$_sg_key "* ]] && eval "${_sg_request#"$_sg_key "}"
done
exit
}
"""


def driver_argv(
    *, data_fd: int | None = None, state: str = STATE, setup: str = "", processes: int = 0
) -> Sequence[str]:
    """Argv of the bash to start inside: stdin, stdout and stderr are the channel, and `data_fd` where there is one.

    `setup` is bash to run first, such as resource limits; `processes` is how many the sandbox may hold, if that is known.

    It needs bash 4 or newer and coreutils in the sandbox, and its first folder writable; as process 1 it also collects
    the dead and cannot be killed from inside.
    """
    mark = "" if data_fd is None else f"printf '\\0%s:\\n' \"$1\" >&{data_fd}"
    close = "" if data_fd is None else f"{data_fd}>&-"
    program = (
        _DRIVER.replace("@DATA@", mark)
        .replace("@CLOSE@", close)
        .replace("@SETUP@", setup)
        .replace("@MOST@", str(processes))
    )
    return ["bash", "-p", "-c", _START, "bash", program, state]


def request(key: str, function: str, *arguments: str) -> bytes:
    """One request; a NUL before it ends whatever stood in the way."""
    words = " ".join(shlex.quote(text) for text in arguments)
    return b"\0" + encode(f"{key} _sg_{function} {words}") + b"\0"


def encode(text: str) -> bytes:
    """Bytes of any text: what came from bytes (PEP 383) goes back to them, other lone surrogates become `?`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")
