#!/usr/bin/env bash
# tool: pyelftools 0.33 on CPython 3.11, x86-64
# finding: the unwind rules of a function with DW_CFA_GNU_args_size are parsed, but get_decoded() raises ValueError for them
# last run: 2026-11-29
#
# GCC and Clang emit this instruction where a call pops its own arguments. It changes no rule: a reader must drop it
# before it decodes the entry. Needs a C compiler, which assembles the function.
. "$(dirname "$0")/lib.sh"
install pyelftools==0.33
cat > "$folder/function.s" <<'S'
.text
.globl f
f:
.cfi_startproc
push %rbp
.cfi_def_cfa_offset 16
.cfi_escape 0x2e, 0x10
pop %rbp
.cfi_def_cfa_offset 8
ret
.cfi_endproc
S
cc -c -o "$folder/function.o" "$folder/function.s"
"$python" -W ignore - "$folder/function.o" <<'PY' | expect "parsed DW_CFA_GNU_args_size; decoding raised ValueError"
import sys

from elftools.dwarf.callframe import FDE, instruction_name
from elftools.elf.elffile import ELFFile

entries = ELFFile(open(sys.argv[1], "rb")).get_dwarf_info().EH_CFI_entries()
(entry,) = (entry for entry in entries if isinstance(entry, FDE))
names = [instruction_name(instruction.opcode) for instruction in entry.instructions]
parsed = next((name for name in names if "args_size" in name), "no such instruction")
try:
    entry.get_decoded()
    print(f"parsed {parsed}; decoded")
except Exception as error:
    print(f"parsed {parsed}; decoding raised {type(error).__name__}")
PY
