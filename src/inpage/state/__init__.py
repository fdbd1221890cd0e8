"""The mechanism, free of any engine: facts of a step -> moves -> copied bytes.

The five rules, and where each one lives:

1. A running state lives in its slot, and nowhere else.                 `slots.SlotTable`
2. Saved when a step ends on a boundary, restored before a step that
   starts from a hit or a resume; exact to the bit.                     `plan`, `pages.PageStore`
3. A checkpoint lives exactly as long as its block.                     nothing here evicts
4. A hit counts only once its checkpoint is written.                    `written.WrittenBlocks`
5. Fail closed.                                                         `ledger.Ledger`, `mover.Mover`

Order inside a step (`mover.Mover`): hand back slots, zero new attention blocks, give slots (zeroed for
cold, restored for hits), forward, save.
"""
