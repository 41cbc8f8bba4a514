# shellcheck shell=bash
# What the launch scripts share. A script declares SWITCHES (flags without a value) and VALUES
# (flags with one), gives the variables of the same names their defaults, and calls parse_flags.

# A failed command inside $(...) ends the script too.
shopt -s inherit_errexit
DRY_RUN=""
ARGS=()
# shellcheck disable=SC2034 # read by the scripts
WORKDIR=""

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

note() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# The comment at the head of the script.
usage() { sed -n '2,/^[^#]/{/^#SBATCH/d;s/^# \{0,1\}//p;}' "${BASH_SOURCE[-1]}"; }

# A command as it could be typed.
quoted() {
    local word text=""
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word=${word@Q}
        text+=" $word"
    done
    printf '%s' "${text:1}"
}

# Prints the command; runs it unless this is a dry run.
run() {
    printf '+ %s\n' "$(quoted "$@")" >&2
    [[ -n $DRY_RUN ]] || "$@"
}

# --max-restarts=3 or --max-restarts 3 sets MAX_RESTARTS; what follows -- goes to ARGS.
parse_flags() {
    local flag value variable known
    while (($#)); do
        flag=${1%%=*}
        case $1 in
        --)
            shift
            ARGS=("$@")
            return
            ;;
        --help | -h)
            usage
            exit 0
            ;;
        --*) ;;
        *) die "unexpected argument '$1': flags come before --, arguments of the run after it" ;;
        esac
        variable=${flag#--}
        variable=${variable//-/_}
        variable=${variable^^}
        if [[ " $SWITCHES dry-run " == *" ${flag#--} "* ]]; then
            [[ $1 != *=* ]] || die "$1: $flag takes no value; leave '=${1#*=}' out"
            printf -v "$variable" 1
            shift
        elif [[ " $VALUES " == *" ${flag#--} "* ]]; then
            if [[ $1 == *=* ]]; then
                value=${1#*=}
                shift
            else
                [[ $# -gt 1 && $2 != --* ]] || die "$flag needs a value, as in $flag=VALUE"
                value=$2
                shift 2
            fi
            printf -v "$variable" '%s' "$value"
        else
            known=" help dry-run $SWITCHES $VALUES"
            die "unknown flag '$flag': this script knows${known// / --}"
        fi
    done
}

# need_number FLAG VALUE LEAST
need_number() {
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ && $2 -ge $3 ]] || die "$1=$2: give a whole number of at least $3"
}

# Puts the run's folder in WORKDIR: --workdir among ARGS, else the default $1, then added to them.
set_workdir() {
    local i
    for ((i = 0; i < ${#ARGS[@]}; i++)); do
        case ${ARGS[i]} in
        --workdir=*) WORKDIR=${ARGS[i]#*=} && return ;;
        --workdir) WORKDIR=${ARGS[i + 1]:-} && return ;;
        esac
    done
    # shellcheck disable=SC2034 # read by the scripts
    WORKDIR=$1
    ARGS+=("--workdir=$1")
}

# A run without arguments is a slip worth catching before anything is paid for.
need_args() {
    ((${#ARGS[@]})) || die "no arguments for the run: add for example -- --config=configs/tiny.py"
}

# Makes the environment $1 with python $2 ("": it is there) and installs the project with extra $3
# ("" for none).
install_project() {
    if [[ -n $2 && ! -x $1/bin/python ]]; then
        [[ -n $DRY_RUN ]] || command -v "$2" >/dev/null ||
            die "--python=$2: not found; give a Python of 3.11 to 3.13"
        run "$2" -m venv "$1"
    fi
    run "$1/bin/python" -m pip install --quiet --disable-pip-version-check -e "$ROOT${3:+[$3]}"
}
