#!/bin/sh
# Runs as the first process of private mount and pid namespaces (fresh.py starts it): gives the new root its /proc, /sys
# and /dev, makes it our root, and runs the given command there as the user "person". Everything mounted here is gone
# when the namespaces are.
#   inside.sh ROOT SOURCE CACHE ENVIRONMENT COMMAND
# SOURCE: the repository, seen read-only as /mnt/source. CACHE: an engine cache, or "". ENVIRONMENT: a file that sh reads.
set -eu
root=$1 source=$2 cache=$3 environment=$4 command=$5

hostname fresh # of this namespace; /etc/hosts of the root knows it, else sudo complains
mount --bind "$root" "$root"
cd "$root"
mount -t proc -o nosuid,nodev,noexec proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro,nosuid,nodev,noexec proc/sys # no package's script may set this machine's sysctls
mount -t sysfs -o ro,nosuid,nodev,noexec sysfs sys
mount -t tmpfs -o nosuid,mode=755 tmpfs dev
for node in null zero full random urandom tty; do
    : >"dev/$node"
    mount --bind "/dev/$node" "dev/$node"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o nosuid,nodev,mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr

mkdir -p mnt/source mnt/cache mnt/old
mount --bind "$source" mnt/source
mount -o remount,bind,ro mnt/source
if [ -n "$cache" ]; then
    # The cache is read, never written: what is built on top of it goes to a layer that is deleted with the root.
    layers=$(dirname "$root")/cache-layers
    mkdir -p "$layers/upper" "$layers/work"
    chown 1000:1000 "$layers/upper"
    mount -t overlay -o "lowerdir=$cache,upperdir=$layers/upper,workdir=$layers/work" overlay mnt/cache
fi
cp "$environment" mnt/environment

pivot_root . mnt/old
cd /
umount -l /mnt/old
# This shell stays the first process, and does not become the user: the signal that ends it together with fresh.py is
# forgotten when a process changes its user. When it ends, the kernel kills everything else in here.
# A clean environment, as after a login: nothing of the machine outside but what fresh.py chose.
status=0
# shellcheck disable=SC2016  # expanded by the inner shell
env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" \
    setpriv --reuid=1000 --regid=1000 --init-groups \
    env HOME=/home/person USER=person LANG=C.UTF-8 bash -c '. /mnt/environment; cd; eval "$1"' bash "$command" || status=$?
exit "$status"
