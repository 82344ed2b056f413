"""An emulator of PTX in NumPy: runs the kernels' code without a GPU.

`capture.Emulator(device)(f, *arrays)` traces f as for the device, which may be absent, compiles
each Pallas kernel for it, and runs its PTX; all else is evaluated by JAX on the CPU. Its `findings`
are the errors of the kernels:

- accesses outside of the array they belong to, or not aligned (global and shared memory);
- reads of memory, and uses of results, that nothing has written (a global read from which a select
  discards what is unwritten is none: it is NaN here, and shows in results that use it);
- accesses in no order: of blocks, warps, lanes of a warp, asynchronous copies and products;
- writes seen by matrix units or the copy engine without a fence; registers of wgmma that change
  without one, or are accessed before the wait;
- barriers that never complete, parts of warps at instructions of whole ones, endless loops.

Modules: `parse` (text to instructions), `program` (instructions to steps, operands), `machine`
(threads, branches, barriers), `order` (vector clocks), `memory`; the instructions in `arithmetic`,
`movement`, `synchronization`, `matrices`, `tensor_memory`; `launch` runs one kernel, `capture`
compiles it. `launch.count_issued` counts how often each line is issued, at shapes of real layers.

Blocks run together, some thousand threads as one vector, an instruction at a time. A copy by a
thread (cp.async) takes effect when the thread waits for it, and the completion of a copy by the
engine when nobody can go on without it. Products, and the engine's reads and writes, are done at
once and watched until the wait.

Not modelled:

- ptxas: this is PTX, not machine code. Spilled registers and its scheduling are not seen.
- Time, caches, bank conflicts, and other schedules: threads run in one order. Errors are found by
  what is known to be ordered, so that most do not depend on it; deadlocks may.
- Memory order between blocks, beyond that no two may access what one of them writes; atomics;
  clusters; launches that overlap (griddepcontrol).
- Lanes of a warp in global memory, which are taken to be in step.
- The rounding of approximate functions (ex2, rcp, lg2, div.full), exact here and off by up to two
  units on a GPU. Products of matrices are summed in float32, in another order.
- Matrix instructions but products of 16-bit numbers that are summed in float32, by one block. All
  unknown instructions are refused.
- Loads from tensor memory are complete at once, without a wait.
- Accesses of single bytes, copies by cp.async of a part of their size, masks of bar.warp.sync.
- cuDNN and XLA's own kernels, which are not part of the package.
"""
