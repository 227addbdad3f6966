//! Virtual CPUs: as many as were asked for, all alike, all used.

use crate::support::{assert_output, output, run};

/// Prints the number of CPUs, and for each its package, whether it is alone in its core, and whether no
/// other has that core.
const TOPOLOGY: &str = "import os\n\
    def of(cpu, name):\n \
        return open(f'/sys/devices/system/cpu/cpu{cpu}/topology/{name}').read().strip()\n\
    cpus = sorted(os.sched_getaffinity(0))\n\
    cores = {of(cpu, 'core_id') for cpu in cpus}\n\
    packages = {of(cpu, 'physical_package_id') for cpu in cpus}\n\
    alone = all(of(cpu, 'thread_siblings_list') == str(cpu) for cpu in cpus)\n\
    print(os.cpu_count(), len(cpus), len(cores), len(packages), alone)";

#[test]
fn any_number_of_cpus_is_one_package_of_single_threads() {
    for cpus in ["1", "3"] {
        let out = output(run(["--cpus", cpus, "--", "python3", "-c", TOPOLOGY]));
        assert_output(&out, 0, &format!("{cpus} {cpus} {cpus} 1 True\n"), "");
    }
}

#[test]
fn eight_busy_processes_use_eight_cpus() {
    // Nothing is bound to a CPU: the guest's scheduler must find all of them.
    let program = format!(
        "{TOPOLOGY}\n\
        import subprocess, sys, time\n\
        print(subprocess.run(['nproc'], capture_output=True, text=True).stdout.strip())\n\
        def user():\n \
            lines = open('/proc/stat').read().splitlines()\n \
            return [int(l.split()[1]) for l in lines if l[:3] == 'cpu' and l[3] != ' ']\n\
        before = user()\n\
        busy = [subprocess.Popen(['sh', '-c', 'while :; do :; done']) for _ in range(8)]\n\
        deadline = time.monotonic() + 100\n\
        while True:\n \
            used = [now - then for now, then in zip(user(), before)]\n \
            if min(used) >= 10 or time.monotonic() > deadline: break\n \
            time.sleep(0.1)\n\
        for process in busy: process.kill()\n\
        print(len(used), min(used) >= 10, file=sys.stdout)\n\
        print(used, file=sys.stderr)"
    );
    let out = output(run(["--cpus", "8", "--", "python3", "-c", &program]));
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_output(&out, 0, "8 8 8 1 True\n8\n8 True\n", &stderr);
    eprintln!("hundredths of a second of each CPU: {}", stderr.trim());
}
