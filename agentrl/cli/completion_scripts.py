"""Shell scripts that ask ``agentrl`` what completes a word.

Guarantees: no blank is put after a key's ``=`` or a section's ``.``, because a value or a key follows; a key and its
value are one word, though bash splits words at ``=`` and ``:``. Where nothing is offered, files are.
"""

from typer import _completion_shared

BASH = """
%(complete_func)s() {
    local IFS=$' \\t\\n' line="${COMP_LINE:0:COMP_POINT}" words current kept reply
    read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    current="${words[-1]}"
    kept="${current%%"${current##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r reply; do
        [[ -n "$reply" ]] && COMPREPLY+=("${reply#"$kept"}")
    done < <(env COMP_WORDS="$line" COMP_CWORD=$(( ${#words[@]} - 1 )) %(autocomplete_var)s=complete_bash "$1")
    [[ "${COMPREPLY[*]}" == *[=.] ]] && compopt -o nospace
    return 0
}

complete -o default -o nosort -F %(complete_func)s %(prog_name)s
"""

ZSH = """
#compdef %(prog_name)s

%(complete_func)s() {
    local -a replies more whole
    local line="${(j: :)words[1,CURRENT]}"
    local text=$(env COMP_WORDS="$line" COMP_CWORD=$((CURRENT - 1)) %(autocomplete_var)s=complete_bash %(prog_name)s)
    replies=("${(@f)text}")
    more=(${(M)replies:#*[=.]})
    whole=(${replies:#*[=.]})
    (( $#more )) && compadd -S '' -- $more
    (( $#whole )) && compadd -- $whole
    (( $#more + $#whole )) || _files
}

compdef %(complete_func)s %(prog_name)s
"""


def use_own_scripts() -> None:
    """Replace typer's scripts for bash and zsh, which end every word with a blank."""
    _completion_shared._completion_scripts |= {"bash": BASH, "zsh": ZSH}
