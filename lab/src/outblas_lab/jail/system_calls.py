"""Linux' system calls by number, and what the jail's filter does with each: allowed, refused, or by its arguments.

Checked against the tables of Linux 6.18 (``arch/x86/entry/syscalls/syscall_64.tbl`` and ``scripts/syscall.tbl``, which
arm64 uses), which are those of 6.17. A number that stands in no table was given up by the kernel, or came later: the
filter says that there is no such call. A new call goes into one of the tables when somebody has decided on it.
"""

from __future__ import annotations

#: The last kernel release whose calls are all here, and its highest number, the same on both machines.
CHECKED_RELEASE, HIGHEST = "6.18", 469

#: Name -> number on x86_64 and on aarch64; None: that machine has no such call.
CallTable = dict[str, tuple[int | None, int | None]]

#: EPERM, whatever their arguments.
REFUSED: CallTable = {
    # To others: sockets and messages; programs and processes; their memory, signals, place in the schedule and limits.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190),
    "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "execve": (59, 221),
    "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "kcmp": (312, 272), "get_robust_list": (274, 100), "kill": (62, 129),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274),
    "setrlimit": (160, 164), "setpgid": (109, 154), "setsid": (112, 157), "vhangup": (153, 58),
    # Files past landlock: modes, owners, times, attributes (and what they hold), handles, watches, sizes by name.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "getxattrat": (464, 464), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13), "listxattrat": (465, 465), "file_getattr": (468, 468), "file_setattr": (469, 469),
    "truncate": (76, 45), "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27), "inotify_rm_watch": (255, 28), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    # Who this process is, and what it sees.
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143),
    "setresuid": (117, 147), "setresgid": (119, 149), "setfsuid": (122, 151), "setfsgid": (123, 152),
    "setgroups": (116, 159), "capset": (126, 91), "personality": (135, 92), "modify_ldt": (154, None),
    "lsm_set_self_attr": (460, 460), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "open_tree_attr": (467, 467),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "listmount": (458, 458), "statmount": (457, 457), "setns": (308, 268),
    "unshare": (272, 97),
    # The system's own, and doors into the kernel that no product needs.
    "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "acct": (163, 89),
    "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None), "userfaultfd": (323, 282),
    "memfd_secret": (447, 447), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # The machine has a limited number of these for all of its processes.
    "io_setup": (206, 0),
}  # fmt: skip

#: Allowed or refused by their arguments: :mod:`outblas_lab.jail.seccomp` has the rules.
BY_ARGUMENT: CallTable = {
    "clone3": (435, 435), "clone": (56, 220), "tgkill": (234, 131), "prctl": (157, 167), "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239), "socketpair": (53, 199),
    "ioctl": (16, 29), "fcntl": (72, 25),
}  # fmt: skip

#: They reach only this process, its open files, and paths that landlock guards. Some reveal that a file exists:
# ``stat``, : ``readlink``, ``getpriority``. ``uprobe`` and ``uretprobe`` are the kernel's own: traced processes make
# them.
HARMLESS: CallTable = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "access": (21, None), "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, None),
    "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None),
    "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71), "sendto": (44, 206), "recvfrom": (45, 207),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209), "exit": (60, 93),
    "wait4": (61, 260), "uname": (63, 160), "shmdt": (67, 197), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None),
    "link": (86, None), "unlink": (87, None), "symlink": (88, None), "readlink": (89, None), "umask": (95, 166),
    "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156), "capget": (125, 90),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "ustat": (136, None), "statfs": (137, 43), "fstatfs": (138, 44),
    "sysfs": (139, None), "getpriority": (140, 141), "sched_getparam": (143, 121), "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127),
    "mlock": (149, 228), "munlock": (150, 229), "mlockall": (151, 230), "munlockall": (152, 231),
    "arch_prctl": (158, None), "sync": (162, 81), "gettid": (186, 178), "readahead": (187, 213),
    "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123), "io_destroy": (207, 1),
    "io_getevents": (208, 4), "io_submit": (209, 2), "io_cancel": (210, 3),
    "epoll_create": (213, None), "remap_file_pages": (216, 234), "getdents64": (217, 61),
    "set_tid_address": (218, 96), "restart_syscall": (219, 128), "fadvise64": (221, 223),
    "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236),
    "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183), "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "waitid": (247, 95), "ioprio_get": (252, 31), "openat": (257, 56), "mkdirat": (258, 34),
    "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37),
    "symlinkat": (266, 36), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "splice": (275, 76), "tee": (276, 77),
    "sync_file_range": (277, 84), "vmsplice": (278, 75), "epoll_pwait": (281, 22), "signalfd": (282, None),
    "timerfd_create": (283, 85), "eventfd": (284, None), "fallocate": (285, 47), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "signalfd4": (289, 74), "eventfd2": (290, 19), "epoll_create1": (291, 20),
    "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70), "recvmmsg": (299, 243),
    "syncfs": (306, 267), "sendmmsg": (307, 269), "getcpu": (309, 168), "sched_getattr": (315, 275),
    "renameat2": (316, 276), "seccomp": (317, 277), "getrandom": (318, 278), "memfd_create": (319, 279),
    "membarrier": (324, 283), "mlock2": (325, 284), "copy_file_range": (326, 285), "preadv2": (327, 286),
    "pwritev2": (328, 287), "pkey_mprotect": (329, 288), "pkey_alloc": (330, 289), "pkey_free": (331, 290),
    "statx": (332, 291), "io_pgetevents": (333, 292), "rseq": (334, 293), "uretprobe": (335, None),
    "uprobe": (336, None), "close_range": (436, 436), "openat2": (437, 437), "faccessat2": (439, 439),
    "epoll_pwait2": (441, 441), "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446), "futex_waitv": (449, 449), "set_mempolicy_home_node": (450, 450),
    "cachestat": (451, 451), "map_shadow_stack": (453, 453), "futex_wake": (454, 454), "futex_wait": (455, 455),
    "futex_requeue": (456, 456), "lsm_get_self_attr": (459, 459), "lsm_list_modules": (461, 461),
    "mseal": (462, 462),
}  # fmt: skip
