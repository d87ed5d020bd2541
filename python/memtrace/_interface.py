"""The C functions of `libmemtrace.so`: result and arguments of each, as `ctypes` has them.

Written from the source of the library by `tests/interface.rs`; what each does is in `include/memtrace.h`.
"""

from __future__ import annotations

import ctypes
from typing import Any

FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "memtrace_dump": (ctypes.c_int, [ctypes.c_char_p]),
    "memtrace_active": (ctypes.c_int, []),
    "memtrace_version": (ctypes.c_char_p, []),
    "memtrace_push": (ctypes.c_int, [ctypes.c_char_p]),
    "memtrace_push_module": (ctypes.c_int, [ctypes.c_char_p]),
    "memtrace_push_phase": (ctypes.c_int, [ctypes.c_char_p]),
    "memtrace_pop": (ctypes.c_int, []),
    "memtrace_unwind": (None, [ctypes.c_int]),
    "memtrace_label": (ctypes.c_uint32, [ctypes.c_uint32, ctypes.c_int, ctypes.c_char_p]),
    "memtrace_enter": (ctypes.c_uint32, [ctypes.c_uint32]),
    "memtrace_current": (ctypes.c_uint32, []),
    "memtrace_label_sort": (ctypes.c_int, [ctypes.c_uint32]),
    "memtrace_label_parent": (ctypes.c_uint32, [ctypes.c_uint32]),
    "memtrace_label_path": (ctypes.c_size_t, [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t]),
    "memtrace_mark": (None, [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64]),
    "memtrace_module_called": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]),
    "memtrace_calls_begin": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "memtrace_calls_add": (None, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]),
    "memtrace_calls_remove": (None, [ctypes.c_uint32]),
    "memtrace_calls_forget": (None, [ctypes.c_void_p]),
    "memtrace_memory": (ctypes.c_int, [ctypes.c_int, ctypes.c_void_p]),
    "memtrace_restart_peak": (None, [ctypes.c_int]),
    "memtrace_raise_peak": (None, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]),
    "memtrace_operators_learn": (None, [ctypes.c_char_p]),
    "memtrace_operators_prepare": (None, [ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]),
    "memtrace_operators_start": (ctypes.c_int, []),
    "memtrace_operators_stop": (None, []),
    "memtrace_operators_module": (None, [ctypes.c_uint32]),
    "memtrace_operators_count": (ctypes.c_uint64, [ctypes.c_void_p]),
    "memtrace_operators_read": (ctypes.c_size_t, [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]),
    "memtrace_operators_release": (None, [ctypes.c_uint64]),
    "memtrace_changes_ask": (None, [ctypes.c_int]),
    "memtrace_changes_count": (ctypes.c_uint64, [ctypes.c_void_p]),
    "memtrace_changes_read": (ctypes.c_size_t, [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]),
    "memtrace_changes_release": (None, [ctypes.c_uint64]),
    "memtrace_stats": (ctypes.c_size_t, [ctypes.c_void_p, ctypes.c_size_t]),
    "memtrace_init": (None, [ctypes.c_int]),
    "memtrace_malloc": (ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]),
    "memtrace_free": (None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]),
    "memtrace_reset": (None, []),
    "memtrace_memory_fraction": (None, [ctypes.c_double, ctypes.c_int]),
    "memtrace_base_alloc": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p]),
    "memtrace_record_stream": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "memtrace_begin_allocate_to_pool": (None, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]),
    "memtrace_end_allocate_to_pool": (None, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]),
    "memtrace_release_pool": (None, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]),
    "memtrace_string_free": (None, [ctypes.c_void_p]),
    "memtrace_allocator_stats": (ctypes.c_void_p, [ctypes.c_int]),
    "memtrace_allocator_segments": (ctypes.c_void_p, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]),
    "memtrace_now_us": (ctypes.c_uint64, []),
    "memtrace_allocator_reset_peak": (None, [ctypes.c_int]),
    "memtrace_allocator_reset_accumulated": (None, [ctypes.c_int]),
    "memtrace_allocator_fraction": (ctypes.c_double, [ctypes.c_int]),
    "memtrace_allocator_configure": (ctypes.c_void_p, [ctypes.c_char_p]),
    "memtrace_allocator_settings": (ctypes.c_void_p, []),
    "memtrace_allocator_pool": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p]),
    "memtrace_allocator_pool_source": (ctypes.c_void_p, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]),
    "memtrace_allocator_pool_uses": (ctypes.c_int64, [ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64]),
    "memtrace_allocator_observe_oom": (None, [ctypes.c_void_p]),
}

# The words of settings.
STACKS = ("none", "python", "all")
LOG_LEVELS = ("debug", "info", "warning", "error", "off")
